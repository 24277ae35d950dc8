"""Host memory and disk below the pool of one GPU, in real time, with a Llama of 8B shape and random weights.

    python -m benchmarks.tiers.gpu [--layers 32] [--prompt 32000] [--rounds 5] [--streams 16] [--folder /tmp]

Prints, a line of JSON each: copies as loads and demotions make them, with digests and without them, beside a plain
pinned copy; the time to a prompt's first token from host memory, beside the time to compute it, for several lengths,
where the load finds free blocks and where as many blocks leave for it; the same for short prompts, in many pairs; the
gaps between the tokens of running streams alone, beside such prompts that the pool has, and beside loads, and where
the time of their steps goes; decode steps and prompts of an engine with an empty tier and of one without tiers, in
turns; and prompts that are on a disk.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import count, pairwise
from pathlib import Path

import torch

from benchmarks.gpu_transfer import TINY
from benchmarks.tiers.breakdown import Breakdown, TimedStep, host_medians
from benchmarks.tiers.copies import measure_copies, measure_starting
from benchmarks.tiers.engines import (
    BLOCK_TOKENS,
    STREAM_PROMPT,
    TOKEN_BYTES_A_LAYER,
    arrivals,
    engine_of,
    evict,
    finish_capturing,
    first_token,
    prompt,
)
from benchmarks.tiers.pairs import measure_pairs
from benchmarks.tiers.streams import StreamGaps, measure_floor
from benchmarks.two_gpus.report import say
from runtime.garbage import collect_rarely, exempt_living_objects
from services.engines.kv_events import KvTier
from services.engines.pytorch.engine import PyTorchEngine

_TURNS = 2 if TINY else 8
# Prompts of so few tokens are measured more often: a step of theirs is short, and the host's.
_SHORT = 1000


async def measure_resuming(engine: PyTorchEngine, steps: Breakdown, options: argparse.Namespace) -> None:
    """Prompts of several lengths, computed and loaded in turns, so that both have the same conditions."""
    filling = [prompt(options.prompt, number) for number in (1, 2, 3)]
    for each in filling:
        await first_token(engine, each)
    seeds = count(10 * options.prompt)  # each prompt to compute is a new one
    for length in (options.prompt // part for part in options.parts):
        rounds = options.rounds if length > _SHORT else 4 * options.rounds
        asked = prompt(length, length)
        right = (await first_token(engine, asked))[1]
        good = loaded = 0
        for name in ("into free blocks", "while as much goes down"):
            times: dict[str, list[float]] = {"compute": [], "resume": []}
            parts: dict[str, list[TimedStep]] = {"compute": [], "resume": []}
            for number in range(2 * rounds):
                what = ("compute", "resume")[(number + number // 2) % 2]
                await evict(engine)
                if name != "into free blocks":
                    for each in filling[:2]:
                        await first_token(engine, each)
                await engine._loop.call(lambda _core: steps.pop())
                wanted = asked if what == "resume" else prompt(length, next(seeds))
                seconds, ids, cached = await first_token(engine, wanted)
                times[what].append(seconds)
                parts[what] += await engine._loop.call(lambda _core: steps.pop())
                if what == "resume":
                    good += ids == right
                    loaded += cached >= length - BLOCK_TOKENS
            computed, resumed = (statistics.median(each) for each in times.values())
            say("resume", tokens=length, load=name, compute_s=computed, resume_s=resumed, ratio=resumed / computed)
            for what, taken in parts.items():
                spread = [round(each * 1e3, 1) for each in sorted(times[what])]
                say(f"  {what}", ms=spread[:: max(1, len(spread) // 8)], **host_medians(taken))
        asks = 2 * rounds
        tiers = await engine._loop.call(lambda core: core.tiers)
        assert tiers is not None
        blocks = length // BLOCK_TOKENS
        predicted = {
            "predicted_load_s": tiers.rates.load_seconds(KvTier.HOST, blocks),
            "predicted_compute_s": tiers.rates.compute_seconds(blocks),
            "step_s": tiers.rates._step_seconds,
        }
        say("resume", tokens=length, right=f"{good} of {asks}", loaded=f"{loaded} of {asks}", **predicted)


async def measure_empty(engines: dict[str, PyTorchEngine], options: argparse.Namespace) -> None:
    """Decode steps and short prompts of an engine with an empty tier and of one without tiers, in turns."""
    steps: dict[str, list[float]] = {name: [] for name in engines}
    firsts: dict[str, list[float]] = {name: [] for name in engines}
    answer, short = (40, 64) if TINY else (300, 1024)
    for turn in range(_TURNS):
        for name in sorted(engines, reverse=bool(turn % 2)):
            engine = engines[name]
            await engine._loop.call(lambda core: core._pool.clear_cache())
            asked = [prompt(STREAM_PROMPT, 1000 * turn + index) for index in range(options.streams)]
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
    token_bytes = options.layers * TOKEN_BYTES_A_LAYER
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        disk = {
            "path": str(Path(folder) / "kv"),
            "bytes": 6 * length * token_bytes,
            "write_queue_bytes": 2 * length * token_bytes,
        }
        tiers = {"host_bytes": 4 * BLOCK_TOKENS * token_bytes, "disk": disk, "load_patience_seconds": 60}
        pool = length + 4 * BLOCK_TOKENS
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
                predicted_load_s=tiered.rates.load_seconds(KvTier.DISK, length // BLOCK_TOKENS),
                predicted_compute_s=tiered.rates.compute_seconds(length // BLOCK_TOKENS),
                on_disk=tiered.directory.used(KvTier.DISK),
                disk_tokens=load.disk_tokens if load else 0,
            )


async def run(options: argparse.Namespace) -> None:
    exempt_living_objects()
    collect_rarely()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    say("device", name=name, torch=torch.__version__)
    token_bytes = options.layers * TOKEN_BYTES_A_LAYER
    pool = options.prompt + 1024 + options.streams * (STREAM_PROMPT + options.answer + 2 * BLOCK_TOKENS)
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
        if {"resume", "pairs", "streams"} & set(chosen):
            await finish_capturing(tiered)
            steps = await tiered._loop.call(Breakdown)
        if "resume" in chosen:
            await measure_resuming(tiered, steps, options)
        if "pairs" in chosen:
            await measure_pairs(tiered)
        if "streams" in chosen:
            measure_floor(options)
            await StreamGaps(tiered, steps, options).measure()
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
    parser.add_argument("--only", default="empty,copies,resume,pairs,streams,disk")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
