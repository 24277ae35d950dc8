"""The time between two outcomes of steps, and where it goes: parts of the host, and of the device by events."""

import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.gpu_transfer import TINY
from benchmarks.two_gpus.report import quantile, say
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.runners.runner import InflightStep

KINDS = "decode", "demotions", "load", "prompt"
"""Steps of decodes alone, while blocks leave the pool, and while some are loaded too; and steps with a prompt."""


@dataclass(eq=False, slots=True)
class TimedStep:
    """A step: the host's ms since the step before was started, in all and by part; events of the device.

    `waited` are the ms until its outcome came, at `arrived`.
    """

    kind: str
    host: Counter[str]
    events: dict[str, Any] = field(default_factory=dict)
    waited: float = 0.0
    arrived: float = 0.0


class Breakdown:
    """Times all steps of a core from now on. For the engine's thread, between two steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._steps: list[TimedStep] = []
        self._in_flight: deque[TimedStep] = deque()
        self._current: TimedStep | None = None
        self._host: Counter[str] = Counter()
        self._launched = (time.perf_counter(), time.thread_time())
        self._waiting = 0.0
        scheduler, steps, runner = core.scheduler, core.steps, core.runner
        self._time("schedule", scheduler, "schedule_ahead")
        self._time("schedule", scheduler, "schedule")
        self._time("admission", scheduler, "_start")
        self._time("parts of loads", scheduler._loads, "finished")
        self._time("outcomes", steps, "_process")
        if core.tiers is not None:
            self._time("settle", core.tiers, "settle")
        self._start = runner.start
        runner.start = self._started  # type: ignore[method-assign]
        self._watch_graphs(runner)

    def _time(self, name: str, owner: Any, method: str) -> None:
        run = getattr(owner, method)

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return run(*arguments)
            finally:
                self._host[name] += (time.perf_counter() - began) * 1e3

        setattr(owner, method, timed)

    def _watch_graphs(self, runner: Any) -> None:
        """Marks where a captured step begins: its numbers are on the device then."""

        def marked(run: Any) -> Any:
            def computed() -> None:
                self._mark("copied")
                run()
                self._mark("computed")

            return computed

        runner._decodes[:] = [replace(each, run=marked(each.run)) for each in runner._decodes]
        runner._mixed[:] = [
            replace(each, run=marked(each.run), groups=[marked(run) for run in each.groups]) for each in runner._mixed
        ]

    def _mark(self, name: str) -> None:
        if self._current is not None and not TINY:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._current.events[name] = event

    def _started(self, chunks: Sequence[Chunk]) -> InflightStep:
        step = self._current = TimedStep(self._kind(chunks), Counter())
        began = time.perf_counter()
        self._mark("begun")
        started = self._start(chunks)
        self._mark("ended")
        now, used = time.perf_counter(), time.thread_time()
        self._host["launch"] += (now - began) * 1e3
        self._host["all"] = (now - self._launched[0]) * 1e3 - self._waiting
        self._host["on a processor"] = (used - self._launched[1]) * 1e3
        self._host["outcomes"] -= self._waiting
        step.host, self._host, self._launched, self._waiting = self._host, Counter(), (now, used), 0.0
        self._steps.append(step)

        def outcomes() -> Any:
            began = time.perf_counter()
            found = started.outcomes()
            step.arrived = time.perf_counter()
            step.waited = (step.arrived - began) * 1e3
            self._waiting += step.waited
            return found

        return replace(started, outcomes=outcomes)

    def _kind(self, chunks: Sequence[Chunk]) -> str:
        scheduler, tiers = self._core.scheduler, self._core.tiers
        if any(chunk.count > 1 for chunk in chunks):
            return "prompt"
        if scheduler.loading or any(getattr(each, "deferred", 0) for each in scheduler.waiting):
            return "load"
        return "demotions" if tiers is not None and tiers._leaving else "decode"

    def pop(self) -> list[TimedStep]:
        """The steps since the last call; the last of them may be in flight."""
        steps, self._steps = self._steps, []
        return steps


def device_parts(before: TimedStep, step: TimedStep) -> dict[str, float]:
    """The device's ms: idle before a step, since the host was late; for its numbers to come; to compute; to send its
    ids home. Without a captured step only the first, and all from then on.
    """
    marks = step.events
    if "ended" not in marks or "ended" not in before.events:
        return {}
    found = {"idle": before.events["ended"].elapsed_time(marks["begun"])}
    if "copied" not in marks:
        return {**found, "whole step": marks["begun"].elapsed_time(marks["ended"])}
    found["numbers in"] = marks["begun"].elapsed_time(marks["copied"])
    found["compute"] = marks["copied"].elapsed_time(marks["computed"])
    found["ids out"] = marks["computed"].elapsed_time(marks["ended"])
    return found


def say_breakdown(name: str, rounds: Sequence[Sequence[TimedStep]]) -> None:
    """Prints, for each kind of steps, median, p99 and maximum of the time between two outcomes and of its parts; and
    the longest with their parts. In ms.
    """
    if not TINY:
        torch.cuda.synchronize()
    known = [each for steps in rounds for each in zip(steps, steps[1:], steps[2:], strict=False)]
    for kind in KINDS:
        rows = [_row(*each) for each in known if each[1].kind == kind and each[1].arrived]
        if not rows:
            continue
        parts = dict.fromkeys(part for row in rows for part in row)
        quantiles = {part: _quantiles([row.get(part, 0.0) for row in rows]) for part in parts}
        say(f"steps, {name}: {kind}", number=len(rows), **{part: each for part, each in quantiles.items() if each[2]})
        for row in sorted(rows, key=lambda row: -row["gap"])[:4]:
            say(f"  long, {name}: {kind}", **{part: round(taken, 2) for part, taken in row.items() if taken > 0.05})


def _row(before: TimedStep, step: TimedStep, after: TimedStep) -> dict[str, float]:
    """The parts of a step's gap. The host starts the step after it before it waits for its outcome."""
    host = {f"host: {part}": taken for part, taken in step.host.items()}
    following = {f"after: {part}": after.host[part] for part in ("all", "schedule", "launch")}
    device = {f"device: {part}": taken for part, taken in device_parts(before, step).items()}
    return {"gap": (step.arrived - before.arrived) * 1e3, "waited": step.waited, **host, **following, **device}


def _quantiles(values: Sequence[float]) -> list[float]:
    return [round(each, 2) for each in (quantile(values, 0.5), quantile(values, 0.99), max(values))]


def host_medians(steps: Sequence[TimedStep]) -> dict[str, float]:
    """The medians of the host's parts of the steps with a prompt."""
    prompts = [step.host for step in steps if step.kind == "prompt"]
    parts = dict.fromkeys(part for host in prompts for part in host if part != "all")
    return {part: statistics.median(host[part] for host in prompts) for part in parts}
