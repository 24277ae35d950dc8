"""The embedded engine compared with a plain transformers loop, on a random 20M Llama; prints ratios of one run.

    python benchmarks/engine.py [--rounds 60] [--threads 2]

Every figure is the minimum of interleaved rounds, with the median beside it. Needs an idle machine.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.modeling_outputs import CausalLMOutput

from services.engines.answer import Tokens
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine import PyTorchEngine

BATCHES = (1, 16, 64)
PROMPT_TOKENS = 128
VOCABULARY = 8192
GREEDY = Sampling(max_tokens=100_000, temperature=0.0, ignore_eos=True)
DRAWN = Sampling(max_tokens=100_000, temperature=0.8, top_p=0.95, seed=1, ignore_eos=True)

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of a step."""

    least: float
    median: float


def save_model(folder: Path) -> None:
    """18.9 M parameters: 8 layers, hidden 384, 6 heads over 2 KV heads of 64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def prompts(count: int) -> list[tuple[int, ...]]:
    """Random prompts of one length, so that the plain loop needs no padding."""
    ids = torch.randint(3, VOCABULARY, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(count))
    return [tuple(row) for row in ids.tolist()]


def plain_step(folder: Path, batch: int) -> Step:
    """One decode step of the plain library: a padded batch over a DynamicCache."""
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    cache = DynamicCache(config=model.config)
    ids = torch.tensor(prompts(batch))
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits
    newest = [logits[:, -1].argmax(dim=-1, keepdim=True), mask]

    def step() -> None:
        ids, mask = newest
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1, past_key_values=cache
        )
        newest[:] = [out.logits[:, -1].argmax(dim=-1, keepdim=True), mask]
        newest[0].tolist()

    return step


class ConstantModel:
    """A model that computes nothing: what remains is the engine's own cost."""

    def __init__(self) -> None:
        self._logits = torch.randn(1, max(BATCHES), VOCABULARY)

    def __call__(self, *, logits_to_keep: torch.Tensor, **_: object) -> CausalLMOutput:
        return CausalLMOutput(logits=self._logits[:, : len(logits_to_keep)].clone())


def engine_step(folder: Path, batch: int, sampling: Sampling = GREEDY, *, constant: bool = False) -> Step:
    """One decode step of the engine: schedule, tensors, model, sampling."""
    core = EngineCore(PyTorchConfig(model=folder, device="cpu", kv_cache_bytes=512 << 20))
    for prompt in prompts(batch):
        core.submit(core.new_sequence(Prompt(prompt), sampling, lambda _event: None, hold=False))
    while any(sequence.remaining != 1 for sequence in core.scheduler.running) or core.scheduler.waiting:
        core.steps.step()
    if constant:
        core.runner._module = ConstantModel()  # type: ignore[assignment]
    return core.steps.step


def measure(steps: Sequence[Step], rounds: int) -> list[Timing]:
    """Times each in turn, round after round, so that a disturbance affects all of them."""
    times: list[list[float]] = [[] for _ in steps]
    with torch.inference_mode():
        for _ in range(rounds):
            for index, step in enumerate(steps):
                began = time.perf_counter()
                step()
                times[index].append((time.perf_counter() - began) * 1000)
    return [Timing(min(taken), statistics.median(taken)) for taken in times]


async def tokens_per_second(engine: PyTorchEngine, streams: int, tokens: int) -> float:
    """Tokens a second of all streams together, measured from the last stream's first token."""

    async def read(prompt: tuple[int, ...]) -> int:
        count = 0
        async with aclosing(
            engine.decode(Prompt(prompt), Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True))
        ) as stream:
            async for item in stream:
                count += len(item.ids) if isinstance(item, Tokens) else 0
        return count

    began = time.perf_counter()
    total = sum(await asyncio.gather(*(read(prompt[:16]) for prompt in prompts(streams))))
    return total / (time.perf_counter() - began)


async def streams_together(folder: Path) -> None:
    """32 streams compared with one, through the asynchronous interface."""
    async with PyTorchEngine(PyTorchConfig(model=folder, device="cpu", prefix_cache=False)) as engine:
        alone = max([await tokens_per_second(engine, 1, 100) for _ in range(3)])
        together = max([await tokens_per_second(engine, 32, 100) for _ in range(3)])
    print(f"1 stream {alone:.0f} tokens/s, 32 streams {together:.0f} tokens/s: {together / alone:.1f} times")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        for batch in BATCHES:
            with torch.inference_mode():
                steps = [
                    plain_step(folder, batch),
                    engine_step(folder, batch),
                    engine_step(folder, batch, DRAWN),
                    engine_step(folder, batch, constant=True),
                ]
            plain, greedy, drawn, own = measure(steps, arguments.rounds)
            print(
                f"batch {batch:2}: plain {plain.least:6.2f} ({plain.median:6.2f}) ms, "
                f"engine {greedy.least:6.2f} ({greedy.median:6.2f}) ms, ratio {greedy.least / plain.least:.3f} "
                f"({greedy.median / plain.median:.3f}); top-p {drawn.least:6.2f} ms; own cost {own.least:.2f} ms"
            )
        asyncio.run(streams_together(folder))


if __name__ == "__main__":
    main()
