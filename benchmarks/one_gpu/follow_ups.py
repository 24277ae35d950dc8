"""Follow-up turns of agents: prompts that are cached but for their last tokens, alone and beside running streams.

    python -m benchmarks.one_gpu.follow_ups [--layers 32] [--cached 4000 32000] [--new 20 100 250] [--rounds 6]

An engine of an 8B Llama's shape with random weights, whose steps with prompts are captured, or not, in turns. Prints, a
line of JSON each: the time and the memory that capturing takes; the time to the first token; the longest gap of a
stream meanwhile; and of the steps with a prompt the host's time, and the device's from the first operation to the last.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmarks.gpu_transfer import TINY
from benchmarks.tiers.engines import arrivals, captured, engine_of, finish_capturing, first_token, prompt
from benchmarks.two_gpus.report import say
from runtime.garbage import collect_rarely, exempt_living_objects
from services.engines.prompt import Prompt
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.runners.fused_runner import FusedRunner
from services.engines.pytorch.runners.runner import InflightStep

_STREAM_PROMPT = 32 if TINY else 256
_PAUSE_SECONDS = 0.06
_AFTER_SECONDS = 0.012


@dataclass(frozen=True, slots=True)
class TimedStep:
    """The host's ms of starting a step, and events before and after its operations on the device, if there is one."""

    has_prompt: bool
    host_ms: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None


class StepClock:
    """Times the steps of a runner."""

    def __init__(self, runner: FusedRunner) -> None:
        self.steps: list[TimedStep] = []
        self._start = runner.start
        runner.start = self._timed  # type: ignore[method-assign]

    def _timed(self, chunks: Sequence[Chunk]) -> InflightStep:
        events = None if TINY else (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        if events is not None:
            events[0].record()
        began = time.perf_counter()
        started = self._start(chunks)
        taken = (time.perf_counter() - began) * 1e3
        if events is not None:
            events[1].record()
        self.steps.append(TimedStep(any(chunk.count > 1 for chunk in chunks), taken, events))
        return started

    def pop(self) -> list[TimedStep]:
        """Returns the steps since the last call."""
        steps, self.steps = self.steps, []
        return steps


def medians(steps: Sequence[TimedStep]) -> dict[str, float]:
    """The medians of steps with prompts, and of the others."""
    found = {}
    for has_prompt, name in ((True, "with_prompt"), (False, "decode")):
        some = [step for step in steps if step.has_prompt is has_prompt]
        if some:
            found[f"{name}_host_ms"] = statistics.median(step.host_ms for step in some)
            found[f"{name}_host_most"] = max(step.host_ms for step in some)
        on_device = [step.events[0].elapsed_time(step.events[1]) for step in some if step.events]
        if on_device:
            found[f"{name}_device_ms"] = statistics.median(on_device)
    return found


async def measure(engine: PyTorchEngine, clock: StepClock, options: argparse.Namespace, streams: int) -> None:
    """Turns of all lengths, beside so many streams."""
    turns = [(cached, new) for cached in options.cached for new in options.new]
    found: dict[tuple[int, int, bool], tuple[list[float], list[float]]] = {}
    steps: dict[tuple[int, int, bool], list[TimedStep]] = {}
    for number in range(options.rounds):
        asked = [prompt(_STREAM_PROMPT, 100 * number + index) for index in range(streams)]
        running = [asyncio.create_task(arrivals(engine, each, options.answer)) for each in asked]
        await asyncio.sleep(0.4 if streams else 0.0)
        windows: list[tuple[tuple[int, int, bool], float, float]] = []
        for index, (cached, new) in enumerate(turns):
            prefix, seed = prompt(cached, cached).token_ids, 100_000 * streams + 10_000 * number + 100 * index
            for is_captured in (True, False) if number % 2 else (False, True):
                with captured(engine.runner, is_captured):
                    key, asked_now = (cached, new, is_captured), prompt(new, seed + is_captured).token_ids
                    await engine._loop.call(lambda _core: clock.pop())
                    sent = time.perf_counter()
                    taken, _, reused = await first_token(engine, Prompt((*prefix, *asked_now)))
                    assert reused == cached, (reused, cached)
                    await asyncio.sleep(_PAUSE_SECONDS)
                    found.setdefault(key, ([], []))[0].append(taken * 1e3)
                    taken_steps = await engine._loop.call(lambda _core: clock.pop())
                    steps.setdefault(key, []).extend(taken_steps if number else [])
                    windows.append((key, sent, sent + taken + _AFTER_SECONDS))
        gaps = [pair for times, _, _ in await asyncio.gather(*running) for pair in pairwise(times)]
        for key, began, ended in windows:
            beside = [(b - a) * 1e3 for a, b in gaps if b > began and a < ended]
            if beside:
                found[key][1].append(max(beside))
    if not TINY:
        torch.cuda.synchronize()
    for (cached, new, is_captured), (firsts, longest) in found.items():
        say(
            "turn",
            streams=streams,
            cached=cached,
            new=new,
            captured=is_captured,
            ttft_ms=statistics.median(firsts[1:]),
            ttft_most=max(firsts[1:]),
            longest_gap_ms=statistics.median(longest[1:]) if longest[1:] else 0.0,
            **medians(steps[cached, new, is_captured]),
        )


async def run(options: argparse.Namespace) -> None:
    exempt_living_objects()
    collect_rarely()
    say("device", name="none" if TINY else torch.cuda.get_device_name(), torch=torch.__version__)
    options.prompt = max(options.cached)
    # So long that the streams run beside all turns of a round.
    options.answer = int((0.5 + 2 * len(options.cached) * len(options.new) * (_PAUSE_SECONDS + 0.04)) / 0.005)
    pool = 2 * sum(options.cached) + options.streams * (_STREAM_PROMPT + options.answer + 64) + 16_384
    async with engine_of(options, pool, None) as engine:
        await finish_capturing(engine)
        for cached in options.cached:
            await first_token(engine, prompt(cached, cached))
        assert isinstance(engine.runner, FusedRunner)
        clock = StepClock(engine.runner)
        for streams in (0, options.streams):
            await measure(engine, clock, options, streams)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_gpu.follow_ups", description=__doc__)
    parser.add_argument("--layers", type=int, default=3 if TINY else 32)
    parser.add_argument("--cached", type=int, nargs="+", default=[64, 1024] if TINY else [4000, 32_000])
    parser.add_argument("--new", type=int, nargs="+", default=[20, 100, 250], help="tokens of a turn")
    parser.add_argument("--rounds", type=int, default=2 if TINY else 6)
    parser.add_argument("--streams", type=int, default=4 if TINY else 16)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
