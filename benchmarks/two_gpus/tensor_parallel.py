"""A model split between two GPUs: its greedy ids beside one GPU's, and its decode step at 8B shape.

python -m benchmarks.two_gpus.tensor_parallel ids|step [--size 1|2] [--no-graphs] [--nccl]
"""

import argparse
import asyncio
import os
import sys
import time

from benchmarks.gpu import TOKENS, decode_step
from benchmarks.gpu_transfer import TINY
from benchmarks.two_gpus.beside_decode import prompt
from benchmarks.two_gpus.model import VOCABULARY, big_shape, engine_of, small_shape
from benchmarks.two_gpus.report import table
from services.engines.answer import Tokens
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.engine import PyTorchEngine

BATCHES = (1, 4) if TINY else (1, 16, 64)


async def ids_of(engine: PyTorchEngine, asked: Prompt, tokens: int) -> tuple[int, ...]:
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    found: list[int] = []
    async for item in engine.decode(asked, sampling):
        if isinstance(item, Tokens):
            found += item.ids
    return tuple(found)


async def same_ids() -> None:
    """Float32, 24 prompts at once, with graphs and without. Prints each row when it is known."""
    lengths = (1, 17, 64, 200, 500, 1000) * 4
    prompts = [Prompt(tuple(t % 320 for t in prompt(length, seed).context)) for seed, length in enumerate(lengths)]
    variants: dict[str, dict[str, object]] = {
        "one GPU": {},
        "two GPUs, without graphs": {"tensor_parallel_size": 2, "cuda_graphs": False},
        "two GPUs": {"tensor_parallel_size": 2},
    }
    first: list[tuple[int, ...]] = []
    print("| float32, greedy, 48 tokens | same ids as one GPU | different answers |\n|---|---|---|", flush=True)
    for name, options in variants.items():
        async with engine_of(small_shape(), dtype="float32", kv_cache_bytes=256 << 20, **options) as engine:
            found = await asyncio.gather(*(ids_of(engine, each, 48) for each in prompts))
        first = first or found
        same = sum(a == b for a, b in zip(first, found, strict=True))
        print(f"| {name} | {same} of {len(first)} | {len({*found})} |", flush=True)


async def steps(size: int, graphs: bool) -> None:
    """The decode step through the whole engine, as benchmarks/gpu.py measures it; and prefill of one prompt."""
    began = time.perf_counter()
    async with engine_of(big_shape(), tensor_parallel_size=size, cuda_graphs=graphs) as engine:
        started = time.perf_counter() - began
        greedy = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        one = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        rows: list[tuple[object, ...]] = []
        for batch in BATCHES:
            for _ in range(2):
                found = await (tiny_step(engine, batch) if TINY else decode_step(engine, batch, greedy))
            rows.append((f"decode, batch {batch}", found["mean_ms"], found["p50_ms"], found["p99_ms"]))
        taken = []
        for seed in range(4):
            asked, start = prompt(200 if TINY else 4000, 99_000 + seed), time.perf_counter()
            async for _ in engine.decode(asked, one):
                taken.append((time.perf_counter() - start) * 1e3)
                break
        rows.append(("a prompt of 4,000 tokens", sorted(taken)[1], "", ""))
    table((f"tensor_parallel_size {size}", "mean, ms", "p50", "p99"), rows)
    print(f"started in {started:.1f} s, vocabulary {VOCABULARY}", flush=True)


async def tiny_step(engine: PyTorchEngine, batch: int) -> dict[str, float]:
    began = time.perf_counter()
    await asyncio.gather(*(ids_of(engine, prompt(20, seed), 8) for seed in range(batch)))
    took = (time.perf_counter() - began) / 8 * 1e3
    return {"mean_ms": took, "p50_ms": took, "p99_ms": took}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ids", "step"))
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--nccl", action="store_true", help="only NCCL between the ranks")
    chosen = parser.parse_args()
    if chosen.nccl and os.environ.get("BATON_BENCHMARK_NCCL") != "1":
        os.environ["BATON_BENCHMARK_NCCL"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.two_gpus.tensor_parallel", *sys.argv[1:]])
    asyncio.run(same_ids() if chosen.what == "ids" else steps(chosen.size, not chosen.no_graphs))
