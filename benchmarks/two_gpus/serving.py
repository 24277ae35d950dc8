"""Disaggregated (prefill on GPU 0, decode on GPU 1) beside aggregated workers (both on each GPU), through gRPC.

    python -m benchmarks.two_gpus.serving [--layers 32] [--rates 6 12 20] [--seconds 12] [--output FOLDER]

Workers, router and client are processes of their own. Requests arrive open-loop, by a Poisson process that is the same
for both: four of five have 512 tokens, one 4,000; all answers have 128 tokens. Before each one the client asks the
router (ExplainRoute) what it predicts.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc

from baton.inference.v1 import cluster_service_pb2, cluster_service_pb2_grpc, generate_pb2, inference_service_pb2_grpc
from baton.inference.v1.sampling_pb2 import SamplingParams, StoppingOptions
from benchmarks.gpu_transfer import TINY
from benchmarks.two_gpus.cluster import TOPOLOGIES, cluster
from benchmarks.two_gpus.model import VOCABULARY, big_shape
from benchmarks.two_gpus.report import quantile, table
from rpc.channels import open_channel

SHORT, LONG, ANSWER = (24, 120, 8) if TINY else (512, 4000, 128)
LONG_SHARE = 0.2
TTFT_TARGET_SECONDS, TOKEN_TARGET_SECONDS = 0.5, 0.015


@dataclass(frozen=True, slots=True)
class Measured:
    """One answered request. Times are in seconds; `predicted` is the router's, to the first token, if it says."""

    prompt_tokens: int
    ttft: float
    gaps: tuple[float, ...]
    predicted: float | None
    has_handoff: bool

    @property
    def per_token(self) -> float:
        return statistics.mean(self.gaps) if self.gaps else 0.0

    @property
    def is_good(self) -> bool:
        return self.ttft <= TTFT_TARGET_SECONDS and self.per_token <= TOKEN_TARGET_SECONDS


class Client:
    """Asks one router."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        self._cluster = cluster_service_pb2_grpc.ClusterServiceStub(channel)

    async def ask(self, ids: Sequence[int]) -> Measured | None:
        """Returns None, and says why, if it fails."""
        request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(ids=ids),
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingOptions(max_tokens=ANSWER, ignore_eos=True),
        )
        try:
            predicted = await self._predicted(request)
            sent, times = time.perf_counter(), []
            has_handoff = False
            async for message in self._stub.Generate(request, timeout=120):
                if message.HasField("token"):
                    times += [time.perf_counter()] * len(message.token.token_ids)
                if message.HasField("finished"):
                    has_handoff = bool(message.finished.prefill_worker_id)
        except grpc.aio.AioRpcError as error:
            print(f"failed: {error.code().name} {error.details()}", flush=True)
            return None
        gaps = tuple(b - a for a, b in pairwise(times))
        return Measured(len(ids), times[0] - sent, gaps, predicted, has_handoff)

    async def _predicted(self, request: generate_pb2.GenerateRequest) -> float | None:
        explained = await self._cluster.ExplainRoute(
            cluster_service_pb2.ExplainRouteRequest(request=request), timeout=20
        )
        if not explained.candidates:
            return None
        best = explained.candidates[0]
        return best.wait_seconds + best.prefill_seconds


def arrivals(rate: float, seconds: float) -> list[tuple[float, int, int]]:
    """The times of requests, the lengths of their prompts, and their seeds."""
    chance, at, found = random.Random(int(rate * 1000)), 0.0, []
    while (at := at + chance.expovariate(rate)) < seconds:
        found.append((at, LONG if chance.random() < LONG_SHARE else SHORT, chance.randrange(1 << 30)))
    return found


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


async def run_rate(client: Client, rate: float, seconds: float) -> tuple[list[Measured], int]:
    """Returns what was answered, and how many requests there were."""
    plan = [(at, prompt_of(length, seed)) for at, length, seed in arrivals(rate, seconds)]
    begin = time.perf_counter() + 0.2

    async def one(at: float, ids: list[int]) -> Measured | None:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        return await client.ask(ids)

    found = await asyncio.gather(*(one(at, ids) for at, ids in plan))
    return [each for each in found if each is not None], len(plan)


async def warm_up(client: Client) -> None:
    """Compiles what is compiled at first use, opens pools, and lets the router learn."""
    for index in range(3):
        for length in (SHORT, LONG):
            await asyncio.gather(*(client.ask(prompt_of(length, 10 * index + each)) for each in range(4)))


def row(topology: str, rate: float, found: Sequence[Measured], count: int, seconds: float) -> dict[str, Any]:
    gaps = [gap * 1e3 for each in found for gap in each.gaps]
    errors = [abs(each.predicted - each.ttft) / each.ttft for each in found if each.predicted is not None]
    parts = {
        name: [each.ttft * 1e3 for each in found if each.prompt_tokens == length]
        for name, length in (("short", SHORT), ("long", LONG))
    }
    predicted = [each.predicted * 1e3 for each in found if each.predicted is not None]
    return {
        "workers": topology,
        "requests/s": rate,
        "answered": f"{len(found)} of {count}",
        "TTFT p50": quantile([each.ttft * 1e3 for each in found], 0.5),
        "p99": quantile([each.ttft * 1e3 for each in found], 0.99),
        "short p50": quantile(parts["short"], 0.5),
        "short p99": quantile(parts["short"], 0.99),
        "long p50": quantile(parts["long"], 0.5),
        "long p99": quantile(parts["long"], 0.99),
        "ITL p50": quantile(gaps, 0.5),
        "ITL p99": quantile(gaps, 0.99),
        "most": max(gaps, default=float("nan")),
        "goodput, requests/s": sum(each.is_good for each in found) / seconds,
        "predicted TTFT p50": quantile(predicted, 0.5),
        "error p50": quantile(errors, 0.5),
        "error p90": quantile(errors, 0.9),
        "handed over": f"{sum(each.has_handoff for each in found)}",
    }


async def measure(topology: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    async with cluster(topology, big_shape(options.layers)) as [address], open_channel(address) as channel:
        client = Client(channel)
        await warm_up(client)
        for rate in options.rates:
            found, count = await run_rate(client, rate, options.seconds)
            rows.append(row(topology, rate, found, count, options.seconds))
            if options.output:
                name = f"serving-{topology.replace(' ', '_').replace('+', 'and')}-{rate:g}.json"
                (options.output / name).write_text(json.dumps([asdict(each) for each in found]))
    return rows


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Goodput and latencies by rate, if matplotlib is there."""
    if not find_spec("matplotlib"):
        return
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    for axis, key in zip(axes, ("goodput, requests/s", "p99", "ITL p99"), strict=True):
        for topology in dict.fromkeys(each["workers"] for each in rows):
            own = [each for each in rows if each["workers"] == topology]
            axis.plot([each["requests/s"] for each in own], [each[key] for each in own], marker="o", label=topology)
        axis.set_xlabel("requests/s")
        axis.set_title({"p99": "TTFT p99, ms", "ITL p99": "ITL p99, ms"}.get(key, key))
        axis.set_ylim(bottom=0)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 4.0] if TINY else [6.0, 12.0, 20.0])
    parser.add_argument("--seconds", type=float, default=3.0 if TINY else 12.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for topology in TOPOLOGIES:
        try:
            rows += await measure(topology, options)
        except (TimeoutError, EOFError) as error:
            print(f"{topology}: failed: {type(error).__name__} {error}\n", flush=True)
    if rows:
        table(list(rows[0]), [list(each.values()) for each in rows])
        good = f"TTFT within {TTFT_TARGET_SECONDS} s and {TOKEN_TARGET_SECONDS * 1e3:g} ms a token on average"
        print(f"Times in ms. Good are requests with {good}.")
    if rows and options.output:
        plot(rows, options.output / "serving.png")


if __name__ == "__main__":
    asyncio.run(main())
