"""Speeds of the embedded engine and of the transport cuda_ipc on one GPU, as ratios to what its memory allows.

    python benchmarks/gpu.py [--layers 32] [--only decode,together,prefill,transfer,profile] [--execution auto]

A Llama of 8B shape with random bfloat16 weights, made in place: nothing is downloaded. The floor of a decode step is
the bytes that it must read, weights without the input embedding and KV, over the bandwidth of a large copy on this GPU.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from benchmarks.gpu_transfer import copied, measure_transfers, other_reader
from services.engines.answer import Tokens
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.model import attention, loading

CONTEXT = 1080
BATCHES = (1, 16, 64)
TOKENS = 128
VOCABULARY = 128_256
PROMPTS, PROMPT_TOKENS = 64, 1024


def shape(layers: int, positions: int = 8192) -> LlamaConfig:
    """Llama 3 8B's, for prompts of up to so many positions."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def make_weights(_folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """In the place of reading them: random ones, made on the GPU."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    finally:
        torch.set_default_dtype(torch.float32)


def bandwidth() -> float:
    """Bytes per second of a large copy on the GPU, those read and those written."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source), 10)
    return 2 * source.numel() / seconds


def timed(run: Any, rounds: int) -> float:
    """Seconds, the median of so many."""
    taken = []
    for index in range(rounds + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if index >= 3:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def prompt(length: int, seed: int) -> Prompt:
    ids = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    return Prompt(tuple(ids.tolist()))


async def arrivals(engine: PyTorchEngine, asked: Prompt, sampling: Sampling) -> list[float]:
    """The time of each token, through the engine's whole face."""
    times: list[float] = []
    async with aclosing(engine.decode(asked, sampling)) as stream:
        async for item in stream:
            if isinstance(item, Tokens):
                times += [time.perf_counter()] * len(item.ids)
    return times


async def decode_step(engine: PyTorchEngine, batch: int, sampling: Sampling) -> dict[str, float]:
    """Milliseconds from token to token where `batch` requests decode at a context of about CONTEXT."""
    asked = [prompt(CONTEXT - TOKENS // 2, 1000 * batch + index) for index in range(batch)]
    streams = await asyncio.gather(*(arrivals(engine, one, sampling) for one in asked))
    # From the last one's start on until the first one's end, all of them decode.
    begin, end = max(times[4] for times in streams), min(times[-1] for times in streams)
    inside = [[t for t in times if begin <= t <= end] for times in streams]
    mean = [(times[-1] - times[0]) / (len(times) - 1) * 1e3 for times in inside if len(times) > 10]
    gaps = [(b - a) * 1e3 for times in inside for a, b in pairwise(times)]
    return {"mean_ms": statistics.median(mean), "p50_ms": statistics.median(gaps), "p99_ms": quantile(gaps, 0.99)}


def quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


async def measure_decode(engine: PyTorchEngine, layers: int, copy: float) -> None:
    weights = sum(p.numel() * 2 for p in engine._core.module.parameters()) - VOCABULARY * 4096 * 2
    greedy = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    # Random weights make flat distributions, of which a top-p alone would keep most of the vocabulary.
    drawn = Sampling(max_tokens=TOKENS, temperature=0.8, top_k=50, top_p=0.95, seed=5, ignore_eos=True)
    whole = Sampling(max_tokens=TOKENS, temperature=0.8, seed=5, ignore_eos=True)
    samplings = {"greedy": greedy, "top-k 50, top-p 0.95": drawn, "temperature alone": whole}
    for name, sampling in samplings.items():
        for batch in BATCHES:
            await decode_step(engine, batch, sampling)
            found = await decode_step(engine, batch, sampling)
            floor = (weights + batch * CONTEXT * layers * 2 * 8 * 128 * 2) / copy * 1e3
            say("decode", batch=batch, sampling=name, **found, floor_ms=floor, ratio=found["mean_ms"] / floor)


async def measure_together(engine: PyTorchEngine) -> None:
    """Gaps between the tokens of 16 requests while prompts come in, and while another process pulls blocks."""
    greedy = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)
    one = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)

    async def gaps(beside: Callable[[], Awaitable[object]]) -> list[float]:
        asked = [prompt(CONTEXT - 200, 7000 + index) for index in range(16)]
        streams = [asyncio.create_task(arrivals(engine, each, greedy)) for each in asked]
        await asyncio.sleep(0.8)
        began = time.perf_counter()
        await beside()
        ended = time.perf_counter()
        found = [[t for t in times if began <= t <= ended] for times in await asyncio.gather(*streams)]
        return [(b - a) * 1e3 for times in found for a, b in pairwise(times)]

    async def prompts() -> None:
        for index in range(8):
            await arrivals(engine, prompt(PROMPT_TOKENS, 60_000 + index), one)
            await asyncio.sleep(0.02)

    alone = await gaps(lambda: asyncio.sleep(0.8))
    mixed = await gaps(prompts)
    say(
        "gaps",
        alone_mean_ms=statistics.mean(alone),
        with_prompts_of_1024_p50=quantile(mixed, 0.5),
        with_prompts_p99=quantile(mixed, 0.99),
        with_prompts_most=max(mixed),
    )
    async with other_reader(engine.memory, engine.facts.layout) as reader:
        for pause in (0.1, 0.02):
            await asyncio.to_thread(reader.pulls, pause, 0.1)
            counts: list[tuple[int, float, float]] = []

            async def pulls(pause: float = pause, counts: list[tuple[int, float, float]] = counts) -> None:
                counts.append(await asyncio.to_thread(reader.pulls, pause, 0.8))

            found = await gaps(pulls)
            [(count, seconds, pull_ms)] = counts
            share = count * copied(500 << 20) / 1e3 / seconds
            grown = statistics.mean(found) / statistics.mean(alone) - 1
            say(
                "gaps while another process pulls 500 MiB",
                pulls_per_second=count / seconds,
                pull_ms=pull_ms,
                mean_ms=statistics.mean(found),
                grown=grown,
                of_which_the_bytes=share,
            )


async def measure_prefill(engine: PyTorchEngine) -> None:
    """All prompts at once, one token each; and transformers' own attention over the same prompts in one batch."""
    one = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
    taken = []
    for turn in range(3):
        asked = [prompt(PROMPT_TOKENS, 50_000 + 100 * turn + index) for index in range(PROMPTS)]
        began = time.perf_counter()
        await asyncio.gather(*(arrivals(engine, each, one) for each in asked))
        taken.append(time.perf_counter() - began)
    ours = PROMPTS * PROMPT_TOKENS / statistics.median(taken[1:])
    long = []
    for turn in range(4):
        asked_once = prompt(4000, 90_000 + turn)
        began = time.perf_counter()
        await arrivals(engine, asked_once, one)
        long.append(time.perf_counter() - began)
    plain = await asyncio.to_thread(plain_prefill, engine._core.module)
    say("prefill", tokens_per_second=ours, transformers=plain, ratio=ours / plain)
    one_call = await asyncio.to_thread(plain_prompt, engine._core.module, 4000)
    best = statistics.median(long[1:]) * 1e3
    say("one prompt of 4000 tokens", first_token_ms=best, transformers_ms=one_call, ratio=best / one_call)


def plain_prefill(module: Any) -> float:
    """Tokens per second of transformers with its own choice of attention, all prompts in one batch."""
    ids = torch.randint(3, VOCABULARY, (PROMPTS, PROMPT_TOKENS), device="cuda")
    module.set_attn_implementation("sdpa")
    with torch.inference_mode():
        seconds = timed(lambda: module(input_ids=ids, use_cache=True, logits_to_keep=1), 2)
    module.set_attn_implementation(attention.NAME)
    return PROMPTS * PROMPT_TOKENS / seconds


def plain_prompt(module: Any, tokens: int) -> float:
    """Milliseconds of transformers for one prompt."""
    ids = torch.randint(3, VOCABULARY, (1, tokens), device="cuda")
    module.set_attn_implementation("sdpa")
    with torch.inference_mode():
        seconds = timed(lambda: module(input_ids=ids, use_cache=True, logits_to_keep=1), 4)
    module.set_attn_implementation(attention.NAME)
    return seconds * 1e3


def measure_replays(engine: PyTorchEngine) -> None:
    """A replay of each size alone, without the engine around it, every sequence at CONTEXT; and where its time goes."""
    runner: Any = engine._core.runner
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode():
        for batch in BATCHES:
            decode = next(one for one in runner._decodes if one.size >= batch)
            flat = decode.layout.empty()
            tokens, _, width, _ = decode.layout.shape
            flat[2 * tokens : 3 * tokens] = CONTEXT - 1
            tables = flat[4 * tokens :].reshape(tokens, width)
            need = -(-CONTEXT // 32)
            tables[:, :need] = (torch.randperm(tokens * need) + 1).view(tokens, need).numpy()
            decode.flat.copy_(torch.from_numpy(flat))
            say("replay", batch=batch, ms=timed(decode.run, 20) * 1e3)
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                decode.run()
                torch.cuda.synchronize()
            print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=12, max_name_column_width=50))


@asynccontextmanager
async def engine_of(arguments: argparse.Namespace) -> AsyncIterator[PyTorchEngine]:
    loading._read_weights = make_weights
    with tempfile.TemporaryDirectory() as folder:
        shape(arguments.layers).save_pretrained(folder)
        config = PyTorchConfig(
            model=Path(folder),
            device="cuda",
            execution=arguments.execution,
            cuda_graphs=not arguments.no_graphs,
            gpu_memory_share=0.75,  # of what is left, plain transformers get some, and another process
            prefix_cache=False,
        )
        began = time.perf_counter()
        async with PyTorchEngine(config) as engine:
            pool = engine.memory.num_blocks * engine.memory.block_bytes / 2**30
            say(
                "start",
                seconds=time.perf_counter() - began,
                runner=type(engine._core.runner).__name__,
                pool_gib=pool,
                free_gib=torch.cuda.mem_get_info()[0] / 2**30,
            )
            yield engine


def say(what: str, **found: Any) -> None:
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}
    print(what, json.dumps(rounded), flush=True)


async def main(arguments: argparse.Namespace) -> None:
    only = arguments.only.split(",")
    copy = bandwidth()
    torch.cuda.empty_cache()
    say("device", name=torch.cuda.get_device_name(), torch=torch.__version__, copy_gb_per_second=copy / 1e9)
    if "transfer" in only:
        await asyncio.to_thread(measure_transfers, say)
    if {"decode", "together", "prefill", "profile"} & set(only):
        async with engine_of(arguments) as engine:
            if "decode" in only:
                await measure_decode(engine, arguments.layers, copy)
            if "together" in only:
                await measure_together(engine)
            if "prefill" in only:
                await measure_prefill(engine)
            if "profile" in only:
                await asyncio.to_thread(measure_replays, engine)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--only", default="decode,together,prefill,transfer,profile")
    parser.add_argument("--execution", default="auto")
    parser.add_argument("--no-graphs", action="store_true")
    asyncio.run(main(parser.parse_args()))
