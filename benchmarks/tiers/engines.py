"""An engine of 8B shape on one GPU, requests to it, and what brings it into the state that is measured."""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import torch

from benchmarks import gpu
from benchmarks.gpu_transfer import TINY
from benchmarks.two_gpus.model import VOCABULARY, folder_of, small_shape
from benchmarks.two_gpus.report import say
from services.engines.answer import Tokens
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine import PyTorchEngine

TOKEN_BYTES_A_LAYER = small_shape().head_dim * 2 * 2 * 4 if TINY else 2 * 8 * 128 * 2
BLOCK_TOKENS = 16 if TINY else 32
STREAM_PROMPT = 32 if TINY else 256


def prompt(length: int, seed: int) -> Prompt:
    ids = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    return Prompt(tuple(ids.tolist()))


@asynccontextmanager
async def engine_of(
    options: argparse.Namespace, pool_tokens: int, tiers: dict[str, Any] | None, share: float = 1.0
) -> AsyncIterator[PyTorchEngine]:
    """An engine with a pool of so many tokens, and tiers."""
    shape = small_shape(options.layers) if TINY else gpu.shape(options.layers, options.prompt + 4096)
    token_bytes = options.layers * TOKEN_BYTES_A_LAYER
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
