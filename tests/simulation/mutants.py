"""Plants each bug of mutants.yaml in this process, one at a time, and tells how long it takes to be found.

    python -m simulation.mutants [NAME...] [--seconds 600] [--state FILE [--piece 200]]

Exit code 1 unless each is found. With a state file a hunt goes on where an earlier one has stopped.
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import yaml

from simulation.hashes import fix_hashes

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).parent / "mutants.yaml"
INVARIANTS_FILE = Path(__file__).parent / "invariants.yaml"
_FEW_REQUESTS = 20


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted bug: `new` in the place of `old`, which occurs once in `file`; `invariant` is to find it, or any."""

    name: str
    models: str
    file: str
    old: str
    new: str
    held_out: bool = False
    invariant: str = ""
    profile: str = "all"
    # Values for the fleet, for every request and for the plan, in the place of what a seed draws.
    fleet: dict[str, Any] = field(default_factory=dict)
    requests: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Hunt:
    """The state of the hunt for a bug: `found` is the profile and the seed, `by` what was broken."""

    name: str
    next_seed: int = 0
    cpu_seconds: float = 0.0
    requests: int = 0
    found: str = ""
    by: str = ""


def read(file: Path = FILE) -> list[Mutant]:
    """All of them. Raises TypeError for an entry with missing or unknown keys."""
    return [Mutant(**entry) for entry in yaml.safe_load(file.read_text(encoding="utf-8"))]


def plant(mutant: Mutant) -> None:
    """Gives the functions of the product in this process the code that they have with the bug.

    Raises ValueError unless its place occurs once, and is in functions that exist.
    """
    # Before anything of Baton: its clocks are bound when it is imported. Not by whoever only reads the list.
    import simulation.entropy  # noqa: F401

    path = ROOT / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.old!r} occurs {text.count(mutant.old)} times in {mutant.file}")
    module = import_module(mutant.file.removesuffix(".py").replace("/", "."))
    functions = dict(_functions(module))
    changed = text.replace(mutant.old, mutant.new)
    first = text[: text.index(mutant.old)].count("\n") + 1
    last = first + mutant.new.rstrip("\n").count("\n")
    planted = 0
    for name, code in _codes(compile(changed, str(path), "exec", dont_inherit=True)):
        if name in functions and code.co_freevars == functions[name].__code__.co_freevars:
            functions[name].__code__ = code
            planted += any(first <= (line or 0) <= last for *_, line in code.co_lines())
    if not planted:
        raise ValueError(f"{mutant.name}: its place in {mutant.file} is in no function")


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """The functions and methods that a module defines, by their qualified names."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each.co_qualname, each
            if "<locals>" not in each.co_qualname:
                yield from _codes(each)


def _functions(owner: Any, prefix: str = "") -> Iterator[tuple[str, FunctionType]]:
    """The functions of a module or a class as they are called, whatever wraps them."""
    for value in list(vars(owner).values()):
        if inspect.isclass(value) and value.__module__ == (owner.__name__ if not prefix else owner.__module__):
            if value.__qualname__.startswith(prefix) and value is not owner:
                yield from _functions(value, f"{value.__qualname__}.")
            continue
        for inner in (value.fget, value.fset) if isinstance(value, property) else (value,):
            found = (
                inspect.unwrap(getattr(inner, "__func__", inner))
                if callable(getattr(inner, "__func__", inner))
                else None
            )
            if isinstance(found, FunctionType):
                yield found.__qualname__, found


def hunt(mutant: Mutant, seconds: float, progress: Hunt) -> None:
    """Runs seeds with the bug in a process of its own, until one finds something or so much CPU is spent."""
    command = [sys.executable, "-m", "simulation.mutants", "--one", mutant.name, "--seconds", str(seconds)]
    done = subprocess.run(
        [*command, "--first", str(progress.next_seed)],
        capture_output=True,
        text=True,
        timeout=20 * seconds + 300,
    )
    if done.returncode:
        raise RuntimeError(f"{mutant.name}: {done.stderr[-2000:]}")
    found = Hunt(**json.loads(done.stdout.splitlines()[-1]))
    progress.next_seed = found.next_seed
    progress.cpu_seconds += found.cpu_seconds
    progress.requests += found.requests
    if found.found and not _is_broken_without(found.found):
        progress.found, progress.by = found.found, found.by


def _is_broken_without(found: str) -> bool:
    """True if the seed that has found a bug breaks an invariant also without it: then it has found another one."""
    profile, seed = found.split()
    command = [sys.executable, "-m", "simulation", "--profile", profile, "--seeds", seed]
    if profile == "embedded":
        command = [sys.executable, "-m", "simulation.embedded", "--seeds", seed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        print(f"breaks without a planted bug:\n{done.stdout}", flush=True)
    return bool(done.returncode)


def hunt_here(mutant: Mutant, seconds: float, first_seed: int, requests: int = 50) -> Hunt:
    """Plants the bug, and runs seeds in forks of this process."""
    plant(mutant)
    if mutant.profile == "embedded":
        return _hunt_embedded(mutant, seconds, first_seed)
    from simulation.plan import PROFILES
    from simulation.running import run
    from simulation.seeds import make_plan

    progress = Hunt(mutant.name, first_seed)
    while progress.cpu_seconds < seconds:
        seed = progress.next_seed
        profile = PROFILES[seed % len(PROFILES)] if mutant.profile == "all" else mutant.profile
        outcome = run(_shaped(make_plan(seed, profile, requests), mutant))
        progress.next_seed += 1
        progress.cpu_seconds += outcome.cpu_seconds
        progress.requests += outcome.requests
        broken = [problem for problem in outcome.problems if mutant.invariant in problem.partition(":")[0]]
        if broken:
            progress.found, progress.by = f"{profile} {seed}", broken[0][:300]
            break
    return progress


def _hunt_embedded(mutant: Mutant, seconds: float, first_seed: int) -> Hunt:
    """The same in the world of one embedded engine."""
    from simulation.embedded.world import World

    progress = Hunt(mutant.name, first_seed)
    began = time.process_time()
    while not progress.found and progress.cpu_seconds < seconds:
        world = World(progress.next_seed)
        world.run(progress.next_seed)
        if world.laws.problems:
            progress.found, progress.by = f"embedded {progress.next_seed}", world.laws.problems[0][-300:]
        progress.next_seed += 1
        progress.requests += world.asked
        progress.cpu_seconds = time.process_time() - began
    return progress


def _shaped(plan: Any, mutant: Mutant) -> Any:
    """A plan with the values that a bug asks for."""
    from simulation.plan import Fault

    requests = tuple(replace(one, **mutant.requests) for one in plan.requests)
    faults = tuple(Fault(**one) for one in mutant.faults) or plan.faults
    return replace(plan, fleet=replace(plan.fleet, **mutant.fleet), requests=requests, faults=faults, **mutant.plan)


def _hunt_all(chosen: list[Mutant], options: argparse.Namespace) -> int:
    """Hunts in pieces, the first piece of each first. Returns how many were found."""
    known = json.loads(options.state.read_text()) if options.state and options.state.exists() else {}
    hunts = {
        mutant.name: Hunt(**known[mutant.name]) if mutant.name in known else Hunt(mutant.name) for mutant in chosen
    }
    while left := [
        one for one in chosen if not hunts[one.name].found and hunts[one.name].cpu_seconds < options.seconds
    ]:
        for mutant in left:
            progress = hunts[mutant.name]
            hunt(mutant, min(options.piece, options.seconds - progress.cpu_seconds), progress)
            _report(mutant, progress)
            if options.state:
                known[mutant.name] = asdict(progress)
                options.state.write_text(json.dumps(known, indent=1))
    return sum(bool(each.found) for each in hunts.values())


def _report(mutant: Mutant, progress: Hunt) -> None:
    held_out = " (held out)" if mutant.held_out else ""
    where = f"by {progress.found}: {progress.by}" if progress.found else "not yet"
    print(
        f"{mutant.name}{held_out}: {progress.cpu_seconds:.1f} s of CPU, {progress.requests} requests, {where}",
        flush=True,
    )


def _try_invariants(options: argparse.Namespace) -> bool:
    """Plants each bug of invariants.yaml in a fork, and prints what has found it. Returns True if one was not found."""
    # Imported once: bugs are planted in functions that exist.
    import simulation.entropy
    import simulation.running

    assert simulation.running.run
    mutants = read(INVARIANTS_FILE)
    missed = False
    for mutant in mutants:
        if options.names and mutant.invariant not in options.names:
            continue
        progress = _in_fork(mutant, options.seconds)
        missed |= not progress.found
        print(f"{mutant.invariant}: ", end="")
        _report(mutant, progress)
    return missed


def _in_fork(mutant: Mutant, seconds: float) -> Hunt:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.write(writer, json.dumps(asdict(hunt_here(mutant, seconds, 0, _FEW_REQUESTS))).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        content = file.read()
    os.waitpid(child, 0)
    return Hunt(**json.loads(content))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=600, help="of CPU for each")
    parser.add_argument("--piece", type=float, default=60, help="seconds of CPU for one before the next has its turn")
    parser.add_argument("--state", type=Path, help="a file of how far the hunts have come")
    parser.add_argument("--invariants", action="store_true", help="each of invariants.yaml, by the one it is for")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one or options.invariants:
        fix_hashes("simulation.mutants")
    if options.one:
        mutant = next(each for each in read() if each.name == options.one)
        print(json.dumps(asdict(hunt_here(mutant, options.seconds, options.first))))
        return
    if options.invariants:
        sys.exit(_try_invariants(options))
    chosen = [mutant for mutant in read() if not options.names or mutant.name in options.names]
    found = _hunt_all(chosen, options)
    print(f"{found} of {len(chosen)} found")
    sys.exit(found < len(chosen))


if __name__ == "__main__":
    main()
