"""Runs of plans, each in a fork of a process that has imported everything, so that none sees what another has left."""

import gc
import os
import pickle
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from simulation import entropy
from simulation.plan import Plan
from simulation.processes import compile_templates
from simulation.world import World

Result = TypeVar("Result")


@dataclass
class Outcome:
    """The findings of a run."""

    plan: Plan
    digest: str = "-"
    problems: list[str] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    events: int = 0
    cpu_seconds: float = 0.0
    virtual_seconds: float = 0.0
    lines: list[str] | None = None

    @property
    def log(self) -> str:
        """The events, one after another; empty if they were not kept."""
        return "".join(f"{line}\n" for line in self.lines or [])

    @property
    def kind(self) -> str:
        """The invariant that failed first; empty if none did."""
        return self.problems[0].partition(":")[0] if self.problems else ""


def run_here(plan: Plan, *, keeps_log: bool = False) -> Outcome:
    """Runs a plan in this process, which can run no other after it."""
    began = entropy.cpu_seconds()
    world = World(plan, keeps_log=keeps_log)
    world.run()
    codes = Counter(result.code for result in world.results)
    seconds = entropy.Time.now - 1000.0
    cpu = entropy.cpu_seconds() - began
    return Outcome(
        plan, world.digest, world.problems, codes, len(world.results), world.events, cpu, seconds, world.lines
    )


def run(plan: Plan, *, keeps_log: bool = False) -> Outcome:
    """Runs a plan in a fork."""
    if plan.fleet.keeps:
        import simulation.kept.keepers  # noqa: F401  # before the fork
    try:
        return in_child(partial(run_here, plan, keeps_log=keeps_log))
    except ChildProcessError:
        return Outcome(plan, problems=["Simulation: the run has crashed"])


def in_child(work: Callable[[], Result]) -> Result:
    """The result of `work` in a fork, which can be pickled. Raises ChildProcessError if it fails."""
    compile_templates()
    gc.collect()
    gc.freeze()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_in_child(work, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        content = file.read()
    os.waitpid(child, 0)
    if not content:
        raise ChildProcessError("the run has crashed")
    result: Result = pickle.loads(content)
    return result


def _run_in_child(work: Callable[[], object], writer: int) -> None:
    status = 1
    try:
        gc.disable()
        result = work()
        with os.fdopen(writer, "wb") as file:
            pickle.dump(result, file)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_all(plans: Iterable[Plan], seconds: float = float("inf")) -> Iterator[Outcome]:
    """Runs plans one after another, until they have taken so many seconds of CPU."""
    taken = 0.0
    for plan in plans:
        if taken >= seconds:
            return
        outcome = run(plan)
        taken += outcome.cpu_seconds
        yield outcome
