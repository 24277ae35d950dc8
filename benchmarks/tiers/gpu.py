"""Host memory and disk below the pool of one GPU, in real time, with a Llama of 8B shape and random weights.

    python -m benchmarks.tiers.gpu [--layers 32] [--prompt 32000] [--rounds 5] [--streams 16] [--folder /tmp]

Prints, a line of JSON each: copies as loads and demotions make them, with digests and without them, beside a plain
pinned copy; the time to a prompt's first token from host memory, beside the time to compute it, for several lengths,
where the load finds free blocks and where as many blocks leave for it; the gaps between the tokens of running streams
alone, beside such prompts that the pool has, and beside loads; decode steps and prompts of an engine with an empty tier
and of one without tiers, in turns; and prompts that are on a disk.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu
from benchmarks.gpu_transfer import TINY
from benchmarks.tiers.copies import measure_copies, measure_starting
from benchmarks.two_gpus.model import VOCABULARY, folder_of, small_shape
from benchmarks.two_gpus.report import quantile, say
from runtime.garbage import collect_rarely, exempt_living_objects
from services.engines.answer import Tokens
from services.engines.kv_events import KvTier
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine import PyTorchEngine

_TOKEN_BYTES_A_LAYER = small_shape().head_dim * 2 * 2 * 4 if TINY else 2 * 8 * 128 * 2
_BLOCK_TOKENS = 16 if TINY else 32
_STREAM_PROMPT = 32 if TINY else 256
_TURNS = 2 if TINY else 8


def prompt(length: int, seed: int) -> Prompt:
    ids = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    return Prompt(tuple(ids.tolist()))


@asynccontextmanager
async def engine_of(
    options: argparse.Namespace, pool_tokens: int, tiers: dict[str, Any] | None, share: float = 1.0
) -> AsyncIterator[PyTorchEngine]:
    """An engine with a pool of so many tokens, and tiers."""
    shape = small_shape(options.layers) if TINY else gpu.shape(options.layers, options.prompt + 4096)
    token_bytes = options.layers * _TOKEN_BYTES_A_LAYER
    with folder_of(shape) as folder:
        settings: dict[str, Any] = {"device": "cpu", "threads": 1, "execution": "fused"} if TINY else {"device": "cuda"}
        config = PyTorchConfig.model_validate(
            {
                "model": folder,
                "kv_cache_bytes": pool_tokens * token_bytes,
                "gpu_memory_share": share,
                "tiers": tiers,
                "canary_seconds": None,
                "max_sequences": 2 * options.streams,
                **settings,
            }
        )
        began = time.perf_counter()
        async with PyTorchEngine(config) as engine:
            blocks = engine.memory.num_blocks
            say("engine", tiers=tiers or "none", blocks=blocks, start_s=time.perf_counter() - began)
            yield engine


async def arrivals(engine: PyTorchEngine, asked: Prompt, tokens: int) -> tuple[list[float], list[int], int]:
    """The time of each token, the ids, and the number of the prompt's cached tokens."""
    times, ids = list[float](), list[int]()
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    async with aclosing(engine.decode(asked, sampling)) as stream:
        async for item in stream:
            if isinstance(item, Tokens):
                times += [time.perf_counter()] * len(item.ids)
                ids += item.ids
            else:
                return times, ids, item.cached_tokens
    raise AssertionError("a stream ended without its last event")


async def first_token(engine: PyTorchEngine, asked: Prompt) -> tuple[float, list[int], int]:
    """The seconds to the first token, the ids, and the cached tokens."""
    began = time.perf_counter()
    times, ids, cached = await arrivals(engine, asked, 1)
    return times[0] - began, ids, cached


async def evict(engine: PyTorchEngine) -> None:
    """Lets all that no request uses leave the pool, as a large prompt would."""

    def run(core: EngineCore) -> None:
        core._pool.release(core._pool.allocate(core._pool.available))

    await engine._loop.call(run)
    await asyncio.sleep(0.3)  # until it is in host memory


@contextmanager
def captured(runner: Any, is_captured: bool) -> Iterator[None]:
    """Steps with prompts are captured, or not, meanwhile."""
    steps = runner._mixed
    runner._mixed = steps if is_captured else []
    try:
        yield
    finally:
        runner._mixed = steps


async def finish_capturing(engine: PyTorchEngine) -> None:
    """Waits until an idle engine has captured all sizes."""
    runner: Any = engine.runner
    before = 0 if TINY else torch.cuda.mem_get_info()[0]
    began, sizes = time.perf_counter(), len(runner._uncaptured)
    while runner._uncaptured:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    mib = 0.0 if TINY else (before - torch.cuda.mem_get_info()[0]) / 2**20
    say("captured while idle", sizes=sizes, seconds=time.perf_counter() - began, mib=mib)


async def measure_resuming(engine: PyTorchEngine, options: argparse.Namespace) -> None:
    """Prompts of several lengths, computed, and then loaded again and again."""
    filling = [prompt(options.prompt, number) for number in (1, 2, 3)]
    for each in filling:
        await first_token(engine, each)
    for length in (options.prompt // part for part in options.parts):
        asked, computing = prompt(length, length), list[float]()
        right = (await first_token(engine, asked))[1]
        for number in range(options.rounds):
            await evict(engine)  # and the same pause as before a load
            computing.append((await first_token(engine, prompt(length, length + 1 + number)))[0])
        resumed: dict[str, list[float]] = {"into free blocks": [], "while as much goes down": []}
        good = loaded = 0
        for _ in range(options.rounds):
            for name, found in resumed.items():
                await evict(engine)
                if name != "into free blocks":
                    for each in filling[:2]:
                        await first_token(engine, each)
                seconds, ids, cached = await first_token(engine, asked)
                found.append(seconds)
                good += ids == right
                loaded += cached >= length - _BLOCK_TOKENS
        computed = statistics.median(computing)
        for name, found in resumed.items():
            middle = statistics.median(found)
            say("resume", tokens=length, load=name, compute_s=computed, resume_s=middle, ratio=middle / computed)
        count = 2 * options.rounds
        tiers = await engine._loop.call(lambda core: core.tiers)
        assert tiers is not None
        blocks = length // _BLOCK_TOKENS
        predicted = {
            "predicted_load_s": tiers.rates.load_seconds(KvTier.HOST, blocks),
            "predicted_compute_s": tiers.rates.compute_seconds(blocks),
            "step_s": tiers.rates._step_seconds,
        }
        say("resume", tokens=length, right=f"{good} of {count}", loaded=f"{loaded} of {count}", **predicted)


class StepTimes:
    """The host's time of each step of an engine, and of the parts of it that a load adds to; and the longest steps,
    with the parts of each.
    """

    def __init__(self, core: EngineCore) -> None:
        self._taken: dict[str, list[float]] = {}
        self._of_step: dict[str, float] = {}
        self._longest: list[dict[str, float]] = []
        core.steps.step = self._timed("whole", core.steps.step)  # type: ignore[method-assign]
        scheduler, loads = core.scheduler, core.scheduler._loads
        core.steps._start = self._timed("start of a step", core.steps._start)  # type: ignore[method-assign]
        core.steps._process = self._timed("waiting and outcomes", core.steps._process)  # type: ignore[method-assign]
        scheduler.schedule_ahead = self._timed("scheduling", scheduler.schedule_ahead)  # type: ignore[method-assign]
        scheduler.remove = self._timed("removal", scheduler.remove)  # type: ignore[method-assign]
        scheduler._start = self._timed("admission", scheduler._start)  # type: ignore[method-assign]
        core._pool.allocate = self._timed("allocation", core._pool.allocate)  # type: ignore[method-assign]
        loads.begin = self._timed("start of a load", loads.begin)  # type: ignore[method-assign]
        loads.finished = self._timed("parts of loads", loads.finished)  # type: ignore[method-assign]

    def _timed(self, name: str, run: Any) -> Any:
        taken = self._taken.setdefault(name, [])

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return run(*arguments)
            finally:
                taken.append((time.perf_counter() - began) * 1e3)
                self._of_step[name] = self._of_step.get(name, 0.0) + round(taken[-1], 2)
                if name == "whole":
                    self._longest = sorted([*self._longest, self._of_step], key=lambda each: -each["whole"])[:12]
                    self._of_step = {}

        return timed

    def pop_longest(self) -> list[dict[str, float]]:
        """The longest steps since the last call, each with what its parts took, in ms."""
        longest, self._longest = self._longest, []
        return longest

    def pop(self) -> list[tuple[str, dict[str, float]]]:
        """The quantiles of what was timed since the last call, in ms."""
        found = []
        for name, taken in self._taken.items():
            if taken:
                p50, p99 = quantile(taken, 0.5), quantile(taken, 0.99)
                found.append((name, {"number": len(taken), "p50_ms": p50, "p99_ms": p99, "longest_ms": max(taken)}))
                taken.clear()
        return found


async def measure_streams(engine: PyTorchEngine, options: argparse.Namespace) -> None:
    """Gaps between the tokens of streams: alone, beside prompts that the pool has, and beside loads. Of a name that
    ends in "eager", the steps with prompts are not captured.
    """
    await finish_capturing(engine)
    # In turn: the pool has room for the streams and one of them, so that each is out when its turn comes.
    long = [prompt(options.prompt, options.prompt + number) for number in range(3)]
    seconds = 1.0 if TINY else 3.0

    steps = await engine._loop.call(StepTimes)
    besides = ["alone", *options.beside]

    async def gaps(beside: str, pause: float) -> tuple[list[float], list[float], float]:
        """All gaps in ms, those of them without the step that computes the rest of a prompt, and the mean TTFT."""
        asked = [prompt(_STREAM_PROMPT, 100 + index) for index in range(options.streams)]
        streams = [asyncio.create_task(arrivals(engine, each, options.answer)) for each in asked]
        while engine.load().running < len(streams):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1 if TINY else 0.5)
        steps.pop()
        steps.pop_longest()
        began, firsts, windows = time.perf_counter(), list[float](), list[tuple[float, float]]()
        while time.perf_counter() - began < seconds:
            if beside == "alone":
                await asyncio.sleep(0.1)
                windows.append((began, time.perf_counter()))
                continue
            sent = time.perf_counter()
            taken, _, cached = await first_token(engine, long[len(firsts) % 3 if beside.startswith("loads") else 0])
            assert cached > options.prompt / 2, cached
            firsts.append(taken)
            windows.append((sent, sent + taken))
            await asyncio.sleep(pause)
        found = [times for times, _, _ in await asyncio.gather(*streams)]
        for name, taken in steps.pop():
            say(f"host's part of a step, {beside}", which=name, **taken)
        for each in steps.pop_longest():
            say(f"a long step, {beside}", **each)
        every = [(a, b) for times in found for a, b in pairwise(times) if any(x <= a and b <= y for x, y in windows)]
        with_step = {round(end, 3) for _, end in windows} if firsts else set[float]()
        rest = [(a, b) for a, b in every if not any(abs(b - end) < 0.002 for end in with_step)]
        in_ms = [[(b - a) * 1e3 for a, b in each] for each in (every, rest)]
        return in_ms[0], in_ms[1], statistics.mean(firsts) if firsts else 0.0

    for each in reversed(long):
        await first_token(engine, each)
    rounds: dict[str, list[tuple[list[float], list[float], float]]] = {name: [] for name in besides}
    for _ in range(2):
        pause = 0.0
        for name in besides:
            if name.startswith("in the pool"):
                await first_token(engine, long[0])
            with captured(engine.runner, not name.endswith("eager")):
                rounds[name].append(await gaps(name, 0.0 if name.startswith("loads") else pause))
            # As many prompts a second: what the load takes is waited for.
            pause = rounds[name][-1][2] if name.startswith("loads") else pause
    alone = sorted(each for found, _, _ in rounds["alone"] for each in found)
    for name, measured in rounds.items():
        every = [each for found, _, _ in measured for each in found]
        rest = [each for _, found, _ in measured for each in found]
        say(
            "gaps_ms",
            beside=name,
            number=len(every),
            p50=quantile(every, 0.5),
            p99=quantile(every, 0.99),
            p99_to_alone=quantile(every, 0.99) / quantile(alone, 0.99) - 1,
            mean=statistics.fmean(every),
            without_prompt_steps_p99=quantile(rest, 0.99),
            without_prompt_steps_p99_to_alone=quantile(rest, 0.99) / quantile(alone, 0.99) - 1,
            without_prompt_steps_mean=statistics.fmean(rest),
            ttft_ms=statistics.mean(each for _, _, each in measured) * 1e3,
        )


async def measure_empty(engines: dict[str, PyTorchEngine], options: argparse.Namespace) -> None:
    """Decode steps and short prompts of an engine with an empty tier and of one without tiers, in turns."""
    steps: dict[str, list[float]] = {name: [] for name in engines}
    firsts: dict[str, list[float]] = {name: [] for name in engines}
    answer, short = (40, 64) if TINY else (300, 1024)
    for turn in range(_TURNS):
        for name in sorted(engines, reverse=bool(turn % 2)):
            engine = engines[name]
            await engine._loop.call(lambda core: core._pool.clear_cache())
            asked = [prompt(_STREAM_PROMPT, 1000 * turn + index) for index in range(options.streams)]
            streams = await asyncio.gather(*(arrivals(engine, each, answer) for each in asked))
            steps[name].append(statistics.median(b - a for times, _, _ in streams for a, b in pairwise(times[20:])))
            some = [(await first_token(engine, prompt(short, 1000 * turn + 500 + index)))[0] for index in range(8)]
            firsts[name].append(statistics.median(some))
    for what, found in (("step", steps), ("first token", firsts)):
        pairs = [a / b - 1 for a, b in zip(found["empty tier"], found["no tiers"], strict=True)]
        say(
            f"empty tier: {what}",
            with_tier_ms=statistics.median(found["empty tier"]) * 1e3,
            without_ms=statistics.median(found["no tiers"]) * 1e3,
            median_of_pairs=statistics.median(pairs),
            pairs=[round(each, 4) for each in sorted(pairs)],
        )


async def measure_disk(options: argparse.Namespace) -> None:
    """Prompts that come back from the disk, if the engine finds that sooner than computing them."""
    length = options.prompt // 4
    token_bytes = options.layers * _TOKEN_BYTES_A_LAYER
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        disk = {
            "path": str(Path(folder) / "kv"),
            "bytes": 6 * length * token_bytes,
            "write_queue_bytes": 2 * length * token_bytes,
        }
        tiers = {"host_bytes": 4 * _BLOCK_TOKENS * token_bytes, "disk": disk, "load_patience_seconds": 60}
        pool = length + 4 * _BLOCK_TOKENS
        async with engine_of(options, pool, tiers) as engine:
            pair, computed, again = [prompt(length, 1 + number) for number in range(2)], list[float](), list[float]()
            for number in range(6):
                computed.append((await first_token(engine, prompt(length, 50 + number)))[0])
            rights = [(await first_token(engine, each))[1] for each in pair]
            cached = good = 0
            rounds = 6 if TINY else 42
            for number in range(rounds):
                seconds, ids, found = await first_token(engine, pair[number % 2])
                again.append(seconds)
                good += ids == rights[number % 2]
                cached += found > 0
                await asyncio.sleep(0.2)  # while the last one is written
            load = engine.load().memory
            tiered = await engine._loop.call(lambda core: core.tiers)
            assert tiered is not None
            alone = statistics.median(computed[1:])
            say(
                "disk",
                tokens=length,
                compute_s=alone,
                returning_s=statistics.median(again),
                ratio=statistics.median(again) / alone,
                ratio_mean=statistics.fmean(again) / alone,
                longest_s=max(again),
                loaded=f"{cached} of {rounds}",
                right=f"{good} of {rounds}",
                predicted_load_s=tiered.rates.load_seconds(KvTier.DISK, length // _BLOCK_TOKENS),
                predicted_compute_s=tiered.rates.compute_seconds(length // _BLOCK_TOKENS),
                on_disk=tiered.directory.used(KvTier.DISK),
                disk_tokens=load.disk_tokens if load else 0,
            )


async def run(options: argparse.Namespace) -> None:
    exempt_living_objects()
    collect_rarely()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    say("device", name=name, torch=torch.__version__)
    token_bytes = options.layers * _TOKEN_BYTES_A_LAYER
    pool = options.prompt + 1024 + options.streams * (_STREAM_PROMPT + options.answer + 2 * _BLOCK_TOKENS)
    tiers = {"host_bytes": int(4.2 * options.prompt) * token_bytes, "load_patience_seconds": 60}
    chosen: Sequence[str] = options.only.split(",")
    async with AsyncExitStack() as stack:
        tiered = await stack.enter_async_context(engine_of(options, pool, tiers))
        if "empty" in chosen:
            plain = await stack.enter_async_context(engine_of(options, pool, None))
            await measure_empty({"empty tier": tiered, "no tiers": plain}, options)
        if "copies" in chosen:
            await tiered._loop.call(measure_copies)
            await tiered._loop.call(measure_starting)
        if "resume" in chosen:
            await measure_resuming(tiered, options)
        if "streams" in chosen:
            await measure_streams(tiered, options)
    if "disk" in chosen:
        await measure_disk(options)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers.gpu", description=__doc__)
    parser.add_argument("--layers", type=int, default=3 if TINY else 32)
    parser.add_argument("--prompt", type=int, default=1024 if TINY else 32_000, help="tokens")
    parser.add_argument("--rounds", type=int, default=2 if TINY else 4)
    parser.add_argument("--streams", type=int, default=4 if TINY else 16)
    parser.add_argument("--answer", type=int, default=200 if TINY else 1500, help="tokens of a stream")
    parser.add_argument("--beside", nargs="*", default=["loads", "in the pool"], help="beside which streams run")
    parser.add_argument("--folder", type=Path, help="where the disk is")
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 4, 16, 64], help="of the prompt that are resumed")
    parser.add_argument("--only", default="empty,copies,resume,streams,disk")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
