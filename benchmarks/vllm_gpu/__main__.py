"""vLLM behind Baton beside vLLM's own servers, on two GPUs of one host, in one run.

    python -m benchmarks.vllm_gpu --output FOLDER [--proxy toy_proxy_server.py] [--gpus 0 1] [--rounds 2] [--tiny]

Four engines run: a prefill and a decode engine behind Baton, and the same two as `vllm serve` behind vLLM's own proxy
of its two-step flow, which is in vLLM's source at tests/v1/kv_connector/nixl_integration. Each point is measured on one
system after the other, and in the next round the other way round. `--tiny` tries everything on CPUs.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from urllib.request import urlopen

from baton.inference.v1 import generate_pb2
from benchmarks.two_gpus.report import quantile, table
from benchmarks.vllm_gpu.load import Answered, Load, System, run_load
from benchmarks.vllm_gpu.model import shape, write_model
from benchmarks.vllm_gpu.servers import Server, Setup, end, ended, start_baton, start_vllm

CLIENTS = 8
_SUMS = re.compile(
    r"^vllm:nixl_((?:xfer|post)_time_seconds|bytes_transferred)_(sum|count)(?:\{.*\})? ([0-9.e+-]+)$", re.M
)


@dataclass(frozen=True, slots=True)
class Point:
    """A load: prompts of one length, so many at a time, or so many a second."""

    prompt_tokens: int
    at_once: int = 0
    requests: int = 0
    rate: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.prompt_tokens}, {self.at_once} at a time"
            if self.at_once
            else f"{self.prompt_tokens}, {self.rate:g}/s"
        )


POINTS = (
    Point(1024, 1, 10),
    Point(1024, 16, 64),
    Point(1024, 64, 320),
    Point(4000, 1, 8),
    Point(4000, 16, 64),
    Point(1024, rate=12, seconds=10),
    Point(1024, rate=24, seconds=10),
)
TINY = (Point(60, 1, 2), Point(60, 4, 8), Point(60, rate=2, seconds=3))


@dataclass(frozen=True, slots=True)
class Handoffs:
    """The reads of an engine so far, by NIXL's own count."""

    seconds: float = 0.0
    count: float = 0.0
    bytes: float = 0.0
    post_seconds: float = 0.0  # until all of a read was handed to UCX

    def since(self, before: "Handoffs") -> "Handoffs":
        return Handoffs(
            self.seconds - before.seconds,
            self.count - before.count,
            self.bytes - before.bytes,
            self.post_seconds - before.post_seconds,
        )


def handoffs(server: Server | None) -> Handoffs:
    """Reads them from the page of metrics of a decode engine; zeros for None."""
    if server is None:
        return Handoffs()
    with urlopen(server.metrics, timeout=10) as answer:
        found = {f"{name}_{kind}": float(value) for name, kind, value in _SUMS.findall(answer.read().decode())}
    seconds, count = found.get("xfer_time_seconds_sum", 0.0), found.get("xfer_time_seconds_count", 0.0)
    posted = found.get("post_time_seconds_sum", 0.0)
    return Handoffs(seconds, count, found.get("bytes_transferred_sum", 0.0), posted)


class Measuring:
    """Sends loads to systems, and collects rows."""

    def __init__(self, pool: ProcessPoolExecutor, vocabulary: int, answer_tokens: int) -> None:
        self._pool = pool
        self._vocabulary = vocabulary
        self._answer_tokens = answer_tokens
        self._seeds = random.Random(1)
        self.rows: list[dict[str, object]] = []

    async def warm_up(self, system: System, point: Point) -> None:
        await self._answers(system, point)

    async def measure(self, system: System, point: Point, decode: Server | None) -> None:
        before = await asyncio.to_thread(handoffs, decode)
        found = await self._answers(system, point)
        moved = (await asyncio.to_thread(handoffs, decode)).since(before)
        self.rows.append(row(system, point, found, moved))
        print(json.dumps(self.rows[-1]), flush=True)

    async def _answers(self, system: System, point: Point) -> list[Answered]:
        """The parts of all client processes begin at the same time."""
        loop = asyncio.get_running_loop()
        begin = time.time() + 0.7
        arrivals = list(self._arrivals(point))
        count = len(arrivals) or point.requests
        seeds = [self._seeds.randrange(1 << 40) for _ in range(count)]
        clients = min(CLIENTS, point.at_once or CLIENTS)
        load = Load(system, self._vocabulary, point.prompt_tokens, self._answer_tokens, (), 0, begin)
        parts = [
            replace(
                load,
                seeds=tuple(seeds[index::clients]),
                slots=point.at_once // clients,
                arrivals=tuple(arrivals[index::clients]),
            )
            for index in range(clients)
        ]
        found = await asyncio.gather(*(loop.run_in_executor(self._pool, run_load, part) for part in parts))
        return [answered for part in found for answered in part]

    def _arrivals(self, point: Point) -> Sequence[float]:
        draw, at, found = random.Random(int(point.rate * 1000)), 0.0, []
        while point.rate and (at := at + draw.expovariate(point.rate)) < point.seconds:
            found.append(at)
        return found


def row(system: System, point: Point, found: Sequence[Answered], moved: Handoffs) -> dict[str, object]:
    """Figures of one load: milliseconds, tokens/s."""
    good = [each for each in found if not each.error]
    for text in sorted({each.error for each in found if each.error})[:2]:
        print(f"failed: {system.name}: {text}", flush=True)
    first = [(each.times[0] - each.sent) * 1e3 for each in good]
    gaps = [(b - a) * 1e3 for each in good for a, b in pairwise(each.times)]
    per_token = [statistics.mean(b - a for a, b in pairwise(each.times)) * 1e3 for each in good]
    span = max((each.times[-1] for each in good), default=1.0) - min((each.sent for each in good), default=0.0)
    second = [(each.times[1] - each.sent) * 1e3 for each in good if len(each.times) > 1]
    moving = [sum(each.handoff.values()) * 1e3 for each in good if each.handed_over]
    return {
        "prompt, load": str(point),
        "system": system.name,
        "failed": len(found) - len(good),
        "handed over": sum(each.handed_over for each in good) if system.protocol == "grpc" else "",
        "TTFT p50": quantile(first, 0.5),
        "TTFT p99": quantile(first, 0.99),
        "second token p50": quantile(second, 0.5),
        "ITL p50": quantile(gaps, 0.5),
        "ITL p99": quantile(gaps, 0.99),
        "ms/token p50": quantile(per_token, 0.5),
        "tokens/s": sum(len(each.times) for each in good) / span,
        "handoff ms p50": quantile(moving, 0.5) if moving else "",
        "NIXL ms": moved.seconds / moved.count * 1e3 if moved.count else "",
        "NIXL post ms": moved.post_seconds / moved.count * 1e3 if moved.count else "",
        "NIXL MiB": moved.bytes / moved.count / 2**20 if moved.count else "",
        "stages": _medians([each.stages for each in good]),
        "handoff stages": _medians([each.handoff for each in good if each.handed_over]),
    }


def _medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each stage, in milliseconds."""
    names = sorted({name for each in found for name in each})
    return {name: round(quantile([each.get(name, 0.0) * 1e3 for each in found], 0.5), 2) for name in names}


def gpu_memory() -> str:
    """Used MiB of each GPU, by nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return " / ".join(subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()) + " MiB"
    except OSError:
        return "no GPU"


def systems(baton: Sequence[Server], vllm: Sequence[Server]) -> list[tuple[System, Server | None]]:
    """Each system, and the engine whose fetches are counted."""
    found: list[tuple[System, Server | None]] = []
    if len(vllm) == 3:
        found.append((System("vLLM, two steps by its proxy", vllm[2].address, "http"), vllm[1]))
    if baton:
        apart = System("Baton, prefill and decode", baton[2].address, "grpc", generate_pb2.TOPOLOGY_DISAGGREGATED)
        found.append((apart, baton[1]))
    if vllm:
        found.append((System("vLLM, one engine (vllm serve)", vllm[1].address, "http"), None))
    if baton:
        whole = System("Baton, one engine", baton[2].address, "grpc", generate_pb2.TOPOLOGY_AGGREGATED)
        automatic = System("Baton, automatic", baton[2].address, "grpc")
        found += [(whole, None), (automatic, baton[1])]
    return found


async def run(options: argparse.Namespace) -> None:
    model = write_model(options.output / "model", tiny=options.tiny)
    setup = Setup(
        model, options.output, tuple(options.gpus), options.share, options.pool_gib, options.tiny, options.proxy
    )
    print(f"GPU memory before: {gpu_memory()}", flush=True)
    context = get_context("spawn")
    async with ended([]) as started:
        began = time.monotonic()
        wanted = [start for name, start in (("vllm", start_vllm), ("baton", start_baton)) if name in options.systems]
        fleets = dict(zip(options.systems, await asyncio.gather(*(start(setup) for start in wanted)), strict=True))
        for fleet in fleets.values():
            started += fleet
        print(f"ready after {time.monotonic() - began:.0f} s; GPU memory: {gpu_memory()}", flush=True)
        with ProcessPoolExecutor(CLIENTS, mp_context=context) as pool:
            measuring = Measuring(pool, shape(tiny=options.tiny).vocab_size, 8 if options.tiny else 128)
            await measure_all(measuring, systems(fleets.get("baton", ()), fleets.get("vllm", ())), options)
        report(measuring.rows)
        for name, fleet in fleets.items():
            print(f"\n{name}, after SIGTERM: {'; '.join(await asyncio.to_thread(end, fleet))}")
            await asyncio.sleep(2)
            print(f"GPU memory: {gpu_memory()}", flush=True)


async def measure_all(
    measuring: Measuring, found: list[tuple[System, Server | None]], options: argparse.Namespace
) -> None:
    points = [each for each in (TINY if options.tiny else POINTS) if any(name in str(each) for name in options.points)]
    for system, _ in found:
        for point in TINY[1:2] if options.tiny else (POINTS[1], POINTS[4]):
            await measuring.warm_up(system, point)
    began = time.monotonic()
    for number in range(options.rounds):
        for point in points:
            for system, decode in found if number % 2 == 0 else reversed(found):
                if time.monotonic() - began > options.seconds:
                    print("out of time", flush=True)
                    return
                await measuring.measure(system, point, decode)


def report(rows: Sequence[dict[str, object]]) -> None:
    """A line for each point and system, with the median of its rounds."""
    shown = []
    for key in dict.fromkeys((each["prompt, load"], each["system"]) for each in rows):
        same = [each for each in rows if (each["prompt, load"], each["system"]) == key]
        shown.append([_together([each[name] for each in same]) for name in rows[0]])
    table(list(rows[0]), shown)


def _together(values: Sequence[object]) -> object:
    numbers = [value for value in values if isinstance(value, float)]
    return statistics.median(numbers) if numbers else values[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="for logs and configurations")
    parser.add_argument("--proxy", type=Path, help="vLLM's toy_proxy_server.py")
    parser.add_argument("--gpus", nargs=2, default=["0", "1"], help="CUDA_VISIBLE_DEVICES of prefill and of decode")
    parser.add_argument("--share", type=float, default=0.42, help="of a GPU's memory, for each engine")
    parser.add_argument("--pool-gib", type=int, default=14, help="for KV, of each engine")
    parser.add_argument("--systems", nargs="+", default=["vllm", "baton"], choices=["vllm", "baton"])
    parser.add_argument("--points", nargs="+", default=[""], help='the loads whose name has one of these: "64 at"')
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600, help="of measuring")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.systems = [name for name in ("vllm", "baton") if name in options.systems]
    options.output = options.output.resolve()
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
