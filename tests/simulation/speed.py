"""The simulated engine with a measured profile, beside the sweep that was measured: `python -m simulation.speed`.

The files are of the embedded engine and, with the argument `vllm`, of vLLM, on one H200 each (benchmarks/results/gpu.md
and engines_on_gpu.md). Closed loops in virtual time, without a router.
"""

# Before anything of Baton: its clocks are bound when it is imported.
from simulation import entropy  # isort: skip

import asyncio
import json
import statistics
import sys
from pathlib import Path
from random import Random
from typing import Any

from runtime.clock import monotonic
from services.engines.answer import Tokens
from services.engines.base import Engine
from services.engines.prompt import Prompt, Sampling
from services.engines.simulated.config import SimulatedConfig, SimulatedTiming
from services.engines.simulated.engine import SimulatedEngine
from simulation.loop import SimulatedLoop

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
# By engine: how its files are called, and the most tokens of its steps.
ENGINES = {"embedded": ("h200_llama_8b", 4096), "vllm": ("h200_llama_8b_vllm", 8192)}


async def _answer(engine: Engine, prompt: Prompt, tokens: int) -> tuple[float, float]:
    """The seconds to the first token, and from one to the next."""
    came, began = list[float](), monotonic()
    async for event in engine.decode(prompt, Sampling(max_tokens=tokens, ignore_eos=True)):
        if isinstance(event, Tokens):
            came.append(monotonic())
    return came[0] - began, (came[-1] - came[0]) / (tokens - 1)


async def _step(timing: SimulatedTiming, sweep: dict[str, Any], step: dict[str, Any]) -> dict[str, float]:
    draw, length, tokens = Random(1), sweep["prompt_tokens"], sweep["answer_tokens"]
    waiting = iter([Prompt(tuple(draw.choices(range(256), k=length))) for _ in range(step["requests"])])
    took: list[tuple[float, float]] = []

    async def client(engine: Engine) -> None:
        for prompt in waiting:
            took.append(await _answer(engine, prompt, tokens))

    async with SimulatedEngine(SimulatedConfig(num_blocks=16_384, timing=timing)) as engine:
        began = monotonic()
        await asyncio.gather(*(client(engine) for _ in range(step["concurrency"])))
        seconds = monotonic() - began
    first, token = (statistics.median(each) for each in zip(*took, strict=True))
    return {"TTFT": first, "ITL": token, "tokens/s": len(took) * tokens / seconds}


def main() -> None:
    name, step_tokens = ENGINES[sys.argv[1] if len(sys.argv) > 1 else "embedded"]
    sweep = json.loads((RESULTS / f"sweep_{name}.json").read_text())
    timing = SimulatedTiming(profile=str(RESULTS / f"profile_{name}.json"), step_tokens=step_tokens)
    entropy.enter(1)
    loop = SimulatedLoop(1, 1e-6)
    for step in sweep["steps"]:
        measured = {"TTFT": step["first_token"]["p50"], "ITL": step["token"]["p50"]}
        measured["tokens/s"] = step["output_tokens_per_second"]
        simulated = loop.run_until_complete(_step(timing, sweep, step))
        errors = (f"{name} {simulated[name] / measured[name] - 1:+.1%}" for name in measured)
        print(f"{step['concurrency']} at once: {', '.join(errors)}", flush=True)
    entropy.leave()


if __name__ == "__main__":
    main()
