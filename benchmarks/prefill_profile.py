"""Where the time of the embedded engine's prefill goes: kernels by kind, and what the GPU waits for the host.

    python -m benchmarks.prefill_profile [--layers 32] [--steps 2048 4096 8192]

An 8B Llama's shape with random weights. For each size of a step two rows: 64 prompts of 1,024 tokens at once, and the
first token of one prompt of 4,000 tokens. Milliseconds, of all the prompts together.
"""

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_transfer import TINY
from benchmarks.two_gpus.model import big_shape, engine_of
from benchmarks.two_gpus.report import table
from services.engines.answer import Tokens
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.engine import PyTorchEngine

_SHORT, _LONG = ((4, 64), (1, 200)) if TINY else ((64, 1024), (1, 4000))
_POOL: dict[str, object] = {} if TINY else {"kv_cache_bytes": 16 << 30}
_KINDS = {
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK", "cublas"),
    "attention": ("prefill_attention", "decode_attention", "merge_splits", "flash", "fmha"),
    "norms": ("rms_norm",),
    "gate": ("gate",),
    "rotate and write": ("rotate_and_write",),
    "copies": ("Memcpy", "Memset"),
}
_ONE = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)


async def answer(engine: PyTorchEngine, length: int, seed: int) -> None:
    ids = torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed))
    async for item in engine.decode(Prompt(tuple(ids.tolist())), _ONE):
        if isinstance(item, Tokens):
            return


async def prefill(engine: PyTorchEngine, prompts: tuple[int, int], seed: int) -> float:
    """The milliseconds of so many prompts of a length, at once."""
    number, length = prompts
    began = time.perf_counter()
    await asyncio.gather(*(answer(engine, length, seed * 1000 + index) for index in range(number)))
    return (time.perf_counter() - began) * 1e3


def kinds(events: Sequence[Any]) -> Mapping[str, float]:
    """The milliseconds of kernels on the device, by kind."""
    found: dict[str, float] = defaultdict(float)
    for event in events:
        kind = next((kind for kind, names in _KINDS.items() if any(name in event.key for name in names)), "other")
        found[kind] += event.self_device_time_total / 1e3
    return found


async def rows(step_tokens: int, layers: int) -> list[list[object]]:
    """A row for each kind of prompts: its time without the profiler, then its kernels' times."""
    found: list[list[object]] = []
    async with engine_of(big_shape(layers), max_step_tokens=step_tokens, cuda_graphs=False, **_POOL) as engine:
        for prompts in (_SHORT, _LONG):
            plain = sorted([await prefill(engine, prompts, seed) for seed in range(1, 5)])[1]
            with profile(activities=[ProfilerActivity.CPU if TINY else ProfilerActivity.CUDA]) as seen:
                await prefill(engine, prompts, 9)
                if not TINY:
                    torch.cuda.synchronize()
            events = list(seen.key_averages())
            by_kind = kinds(events)
            busy = sum(by_kind.values())
            per_second = prompts[0] * prompts[1] / plain * 1e3
            kernels = [by_kind.get(kind, 0.0) for kind in (*_KINDS, "other")]
            found.append([step_tokens, f"{prompts[0]} x {prompts[1]}", plain, per_second, busy, plain - busy, *kernels])
            for event in sorted(events, key=lambda one: -one.self_device_time_total)[:14]:
                print(
                    f"  {event.self_device_time_total / 1e3:9.2f} ms {event.count:6d} x {event.key[:110]}", flush=True
                )
    return found


async def main(options: argparse.Namespace) -> None:
    found = [row for size in options.steps for row in await rows(size, options.layers)]
    table(["step", "prompts", "ms", "tokens/s", "on the GPU", "waiting", *_KINDS, "other"], found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, nargs="+", default=[128] if TINY else [2048, 4096, 8192])
    asyncio.run(main(parser.parse_args()))
