"""Tokens a second with and without prompt lookup: for a prompt that repeats, and for another one.

    python -m benchmarks.speculation [--tokens 200] [--rounds 5] [--markdown FILE]

Both engines run in this process, one after the other in each round, so that a busy machine slows both down.
"""

import argparse
import asyncio
import os
import statistics
import time
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from services.engines.answer import Finished
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.engine import PyTorchEngine

MODEL = Path(__file__).resolve().parents[1] / "models" / "demo"
PERIOD = (311, 94, 80, 45, 212, 77, 300, 15, 120, 64, 9, 201)
CASES = {
    "repeats, one request": ([PERIOD * 12], 0.0),
    "repeats, sampled at 0.7": ([PERIOD * 12], 0.7),
    "repeats, four requests": ([PERIOD * 12] * 4, 0.0),
    "another prompt, sampled at 1.5": ([tuple(range(20, 120))], 1.5),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a case: its duration, and what speculation counted."""

    seconds: float
    ids: tuple[tuple[int, ...], ...]
    drafted: int
    accepted: int


async def measure(engine: PyTorchEngine, prompts: list[tuple[int, ...]], sampling: Sampling) -> Measured:
    """Runs the prompts at the same time."""
    began = time.perf_counter()
    found = await asyncio.gather(*(_generate(engine, prompt, sampling) for prompt in prompts))
    seconds = time.perf_counter() - began
    return Measured(
        seconds,
        tuple(ids for ids, _ in found),
        sum(finished.drafted_tokens for _, finished in found),
        sum(finished.accepted_tokens for _, finished in found),
    )


async def _generate(
    engine: PyTorchEngine, prompt: tuple[int, ...], sampling: Sampling
) -> tuple[tuple[int, ...], Finished]:
    ids: list[int] = []
    async with aclosing(engine.decode(Prompt(prompt), sampling)) as events:
        async for event in events:
            if isinstance(event, Finished):
                return tuple(ids), event
            ids += event.ids
    raise AssertionError("the generation ended without its last event")


def config(**options: object) -> PyTorchConfig:
    """The demonstration model on one thread."""
    given = {"model": MODEL, "device": "cpu", "threads": 1, "kv_cache_bytes": 64 << 20, "canary_seconds": None}
    return PyTorchConfig.model_validate({**given, **options})


async def compare(tokens: int, rounds: int) -> list[str]:
    """Lines of a table, a case each."""
    lines = [
        "| case | tokens/s without | with | ratio (median of rounds) | accepted of drafted |",
        "|---|---|---|---|---|",
    ]
    speculation = {"kind": "prompt_lookup", "max_tokens": 4, "ngram": 3}
    async with PyTorchEngine(config()) as plain, PyTorchEngine(config(speculation=speculation)) as speculating:
        for case, (prompts, temperature) in CASES.items():
            sampling = Sampling(max_tokens=tokens, temperature=temperature, seed=1, ignore_eos=True)
            pairs = [
                (await measure(plain, prompts, sampling), await measure(speculating, prompts, sampling))
                for _ in range(rounds + 1)
            ][1:]
            assert all(without.ids == with_it.ids for without, with_it in pairs)
            lines.append(_row(case, tokens * len(prompts), pairs))
    return lines


def _row(case: str, tokens: int, pairs: list[tuple[Measured, Measured]]) -> str:
    rates = [statistics.median(tokens / one.seconds for one in side) for side in zip(*pairs, strict=True)]
    ratio = statistics.median(without.seconds / with_it.seconds for without, with_it in pairs)
    last = pairs[-1][1]
    return f"| {case} | {rates[0]:.0f} | {rates[1]:.0f} | {ratio:.2f} | {last.accepted} of {last.drafted} |"


def main() -> None:
    """Prints the table, and writes it to a file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    lines = asyncio.run(compare(arguments.tokens, arguments.rounds))
    load = f"{os.cpu_count()} cores, no GPU, load average {os.getloadavg()[0]:.0f}"
    text = "\n".join(
        [f"Demonstration model, float32, one thread, {arguments.tokens} tokens an answer; {load}.", "", *lines, ""]
    )
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(f"# Speculative decoding by prompt lookup\n\n{text}")


if __name__ == "__main__":
    main()
