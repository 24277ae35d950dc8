"""The gaps between the tokens of running streams: alone, and beside long prompts that are loaded or in the pool."""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from benchmarks.gpu_transfer import TINY
from benchmarks.tiers.breakdown import Breakdown, TimedStep, say_breakdown
from benchmarks.tiers.engines import STREAM_PROMPT, TOKEN_BYTES_A_LAYER, arrivals, captured, first_token, prompt
from benchmarks.two_gpus.report import quantile, say
from services.engines.pytorch.engine import PyTorchEngine

_ROUND_SECONDS = 1.0 if TINY else 3.0
# A gap that ends so near to the first token of a prompt has its step in it.
_NEAR_SECONDS = 0.002
Span = tuple[float, float]


@dataclass(eq=False, slots=True)
class _Beside:
    """The figures of one name: gaps in ms, those without the step that ends a prompt, TTFTs, and each step."""

    gaps: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    steps: list[Sequence[TimedStep]] = field(default_factory=list)

    def add(self, times: Sequence[Sequence[float]], windows: Sequence[Span], firsts: Sequence[float]) -> None:
        """Adds the gaps within the windows, each of which ends with a first token, if there are any."""
        gaps = [(a, b) for one in times for a, b in pairwise(one) if any(x <= a and b <= y for x, y in windows)]
        ends = [end for _, end in windows] if firsts else []
        rest = [(a, b) for a, b in gaps if not any(abs(b - end) < _NEAR_SECONDS for end in ends)]
        self.gaps += [(b - a) * 1e3 for a, b in gaps]
        self.rest += [(b - a) * 1e3 for a, b in rest]
        self.firsts += firsts


class StreamGaps:
    """Measures streams alone, beside loads, and beside prompts that the pool has, in turns.

    Of a name that ends in "eager", the steps with prompts are not captured; of one that ends in "1 ms", a thread that
    others wait for holds the interpreter no longer.
    """

    def __init__(self, engine: PyTorchEngine, steps: Breakdown, options: argparse.Namespace) -> None:
        self._engine = engine
        self._steps = steps
        self._options = options
        # In turn: the pool has room for the streams and one of them, so that each is out when its turn comes.
        self._long = [prompt(options.prompt, options.prompt + number) for number in range(3)]
        self._found = {name: _Beside() for name in ("alone", *options.beside)}

    async def measure(self) -> None:
        """Measures all, twice, and prints the gaps and the steps."""
        for each in reversed(self._long):
            await first_token(self._engine, each)
        for _ in range(2):
            pause = 0.0
            for name in self._found:
                if name.startswith("in the pool"):
                    await first_token(self._engine, self._long[0])
                with _switching_after_a_millisecond(name), captured(self._engine.runner, not name.endswith("eager")):
                    await self._round(name, 0.0 if name.startswith("loads") else pause)
                # As many prompts a second: what the load takes is waited for.
                pause = statistics.mean(self._found[name].firsts) if name.startswith("loads") else pause
        for name in self._found:
            self._say(name)
        for name, found in self._found.items():
            say_breakdown(name, found.steps)

    async def _round(self, name: str, pause: float) -> None:
        asked = [prompt(STREAM_PROMPT, 100 + index) for index in range(self._options.streams)]
        streams = [asyncio.create_task(arrivals(self._engine, each, self._options.answer)) for each in asked]
        while self._engine.load().running < len(streams):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1 if TINY else 0.5)
        await self._engine._loop.call(lambda _core: self._steps.pop())
        windows, firsts = await self._alone() if name == "alone" else await self._prompts(name, pause)
        timed = await self._engine._loop.call(lambda _core: self._steps.pop())
        self._found[name].steps.append(timed)
        self._found[name].add([times for times, _, _ in await asyncio.gather(*streams)], windows, firsts)

    async def _alone(self) -> tuple[list[Span], list[float]]:
        began = time.perf_counter()
        await asyncio.sleep(_ROUND_SECONDS)
        return [(began, time.perf_counter())], []

    async def _prompts(self, name: str, pause: float) -> tuple[list[Span], list[float]]:
        """Sends one prompt after the other; returns the spans up to the first token of each, and their lengths."""
        began, firsts, windows = time.perf_counter(), list[float](), list[Span]()
        while time.perf_counter() - began < _ROUND_SECONDS:
            sent = time.perf_counter()
            asked = self._long[len(firsts) % 3 if name.startswith("loads") else 0]
            taken, _, cached = await first_token(self._engine, asked)
            if cached <= self._options.prompt / 2:
                load = self._engine.load().memory
                say("not cached", beside=name, number=len(firsts), cached=cached, seconds=taken, memory=str(load))
            firsts.append(taken)
            windows.append((sent, sent + taken))
            await asyncio.sleep(pause)
        return windows, firsts

    def _say(self, name: str) -> None:
        found, alone = self._found[name], quantile(self._found["alone"].gaps, 0.99)
        p99, rest = quantile(found.gaps, 0.99), quantile(found.rest, 0.99)
        say(
            "gaps_ms",
            beside=name,
            number=len(found.gaps),
            p50=quantile(found.gaps, 0.5),
            p99=p99,
            p99_to_alone=p99 / alone - 1,
            mean=statistics.fmean(found.gaps),
            without_prompt_steps_p99=rest,
            without_prompt_steps_p99_to_alone=rest / alone - 1,
            without_prompt_steps_mean=statistics.fmean(found.rest),
            ttft_ms=statistics.fmean(found.firsts or [0.0]) * 1e3,
        )


@contextmanager
def _switching_after_a_millisecond(name: str) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001 if name.endswith("1 ms") else before)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def measure_floor(options: argparse.Namespace) -> None:
    """The least time that a step needs to read the keys and values of such a prompt, by a large copy's speed."""
    if TINY:
        return
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    into = torch.empty_like(source)
    times = []
    for _ in range(10):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        into.copy_(source)
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    speed = 2 * source.numel() / min(times) * 1e3
    read = options.prompt * options.layers * TOKEN_BYTES_A_LAYER
    say("keys and values of a prompt", gib=read / 2**30, memory_gb_s=speed / 1e9, floor_ms=read / speed * 1e3)
