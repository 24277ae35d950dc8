"""Loads from host memory on one GPU, in real time, with a Llama of 8B shape and random weights.

    python -m benchmarks.tiers.gpu [--layers 32] [--prompt 32000] [--rounds 5] [--streams 16]

Prints, a line of JSON each: the bandwidth of a plain pinned copy; of loads as the engine makes them, with and without
digests; the time to resume a prompt from host memory and to compute it; the gaps between the tokens of running streams
alone and beside loads; and a decode step with an empty tier and without one.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from typing import Any

import torch

from benchmarks.gpu import make_weights, prompt, quantile, shape, timed
from services.engines.answer import Tokens
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.kv_cache.digester import Digester
from services.engines.pytorch.kv_cache.tiers.host import Copier
from services.engines.pytorch.model import loading

_ROUNDS = 7


@asynccontextmanager
async def engine_of(options: argparse.Namespace, *, tiers: bool) -> AsyncIterator[PyTorchEngine]:
    """An engine whose pool holds one prompt and the streams, and whose host memory holds three prompts."""
    loading._read_weights = make_weights
    token_bytes = options.layers * 2 * 8 * 128 * 2
    with tempfile.TemporaryDirectory() as folder:
        shape(options.layers, options.prompt + 4096).save_pretrained(folder)
        config = PyTorchConfig.model_validate(
            {
                "model": folder,
                "device": "cuda",
                "kv_cache_bytes": (options.prompt + 1024 + options.streams * 2048) * token_bytes,
                "tiers": {"host_bytes": 3 * (options.prompt + options.streams * 2048) * token_bytes} if tiers else None,
                "canary_seconds": None,
            }
        )
        async with PyTorchEngine(config) as engine:
            yield engine


async def arrivals(engine: PyTorchEngine, asked: Prompt, tokens: int) -> tuple[list[float], list[int], int]:
    """When each token came, the ids, and how many tokens of the prompt were cached."""
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


def plain_copy() -> float:
    """Bytes a second of a pinned copy to the device."""
    source = torch.empty(2 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    return source.numel() / timed(lambda: target.copy_(source, non_blocking=True), _ROUNDS)


def own_copies(core: EngineCore, *, digests: bool) -> float:
    """Bytes a second of the copies of a load, into blocks that nothing uses."""
    tiers = core.tiers
    assert tiers is not None
    pool = core.memory.tensor
    block_bytes = core.memory.block_bytes
    copier = Copier(pool, Digester(block_bytes, pool.device))
    batch = max(1, (32 << 20) // block_bytes)
    count = min(core.memory.num_blocks - 1, tiers.host.memory.num_blocks, (2 << 30) // block_bytes) // batch * batch

    def load() -> None:
        for start in range(1, 1 + count, batch):
            blocks = range(start, start + batch)
            for block in blocks:
                copier.copy_in(tiers.host.words[block - 1], block)
            if digests:
                copier.digest(list(blocks))
        copier.wait()

    rate = count * block_bytes / timed(load, _ROUNDS)
    core._pool.clear_cache()
    return rate


async def first_token(engine: PyTorchEngine, asked: Prompt) -> tuple[float, list[int], int]:
    """The seconds to the first token, the ids, and the cached tokens."""
    began = time.perf_counter()
    times, ids, cached = await arrivals(engine, asked, 1)
    return times[0] - began, ids, cached


async def measure_resuming(engine: PyTorchEngine, options: argparse.Namespace) -> None:
    """Each prompt takes the whole pool, so that the other one leaves it."""
    one, other = prompt(options.prompt, 1), prompt(options.prompt, 2)
    await first_token(engine, prompt(options.prompt, 3))
    computing, right, _ = await first_token(engine, one)
    again, other_right, _ = await first_token(engine, other)
    resumed, same = list[float](), 0
    for _ in range(options.rounds):
        for asked, ids in ((one, right), (other, other_right)):
            seconds, found, cached = await first_token(engine, asked)
            resumed.append(seconds)
            same += found == ids and cached >= options.prompt - 64
    computed = statistics.median([computing, again])
    say(
        "resume",
        tokens=options.prompt,
        compute_s=computed,
        resume_s=statistics.median(resumed),
        ratio=statistics.median(resumed) / computed,
        right=f"{same} of {len(resumed)}",
    )


async def measure_streams(engine: PyTorchEngine, options: argparse.Namespace) -> None:
    """Gaps between the tokens of streams, alone and beside a load after the other."""
    one, other = prompt(options.prompt, 1), prompt(options.prompt, 2)

    async def gaps(seconds: float, *, loads: bool) -> list[float]:
        asked = [prompt(256, 100 + index) for index in range(options.streams)]
        streams = [asyncio.create_task(arrivals(engine, each, 1500)) for each in asked]
        await asyncio.sleep(1.0)
        began = time.perf_counter()
        number = 0
        while time.perf_counter() - began < seconds:
            if loads:
                await first_token(engine, (one, other)[number % 2])
                number += 1
            else:
                await asyncio.sleep(0.1)
        ended = time.perf_counter()
        found = [[t for t in times if began <= t <= ended] for times, _, _ in await asyncio.gather(*streams)]
        say("loads beside streams", number=number) if loads else None
        return [(b - a) * 1e3 for times in found for a, b in pairwise(times)]

    alone, beside = await gaps(4.0, loads=False), await gaps(4.0, loads=True)
    for name, found in (("alone", alone), ("beside loads", beside)):
        say("gaps_ms", streams=name, p50=quantile(found, 0.5), p99=quantile(found, 0.99), mean=statistics.mean(found))


async def measure_empty(options: argparse.Namespace) -> None:
    """A decode step and a short prompt, with an empty tier and without one, in turns."""
    for tiers in (False, True, False, True):
        async with engine_of(options, tiers=tiers) as engine:
            streams = [arrivals(engine, prompt(512, 300 + index), 400) for index in range(options.streams)]
            steps = [b - a for times, _, _ in await asyncio.gather(*streams) for a, b in pairwise(times[20:])]
            firsts = [(await first_token(engine, prompt(1024, 500 + index)))[0] for index in range(20)]
            say(
                "empty tier" if tiers else "no tier",
                step_ms=statistics.mean(steps) * 1e3,
                first_ms=statistics.median(firsts) * 1e3,
            )


def say(what: str, **found: Any) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}
    print(json.dumps({"what": what, **rounded}), flush=True)


async def run(options: argparse.Namespace) -> None:
    plain = plain_copy()
    say("plain pinned copy", gb_s=plain / 1e9)
    async with engine_of(options, tiers=True) as engine:
        for digests in (False, True):
            rate = await engine._loop.call(lambda core, digests=digests: own_copies(core, digests=digests))
            say("copies of a load", digests=digests, gb_s=rate / 1e9, of_plain=rate / plain)
        await measure_resuming(engine, options)
        await measure_streams(engine, options)
    await measure_empty(options)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers.gpu", description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32_000, help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
