"""Runs new seeds in several processes for some minutes: `python -m simulation.campaign --first 1000 --seconds 600`.

Prints a line for each seed that breaks an invariant, and the sums at the end. Some seeds are run again in a process
of their own, and the logs are compared. Profiles without faults are left out. Exit code 1 if a seed breaks an
invariant or gives two logs.
"""

# Before anything of Baton: its clocks are bound when it is imported.
from simulation import entropy  # isort: skip

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from simulation.elsewhere import run_elsewhere
from simulation.hashes import fix_hashes
from simulation.plan import PROFILES, Plan
from simulation.running import Outcome, in_child, run_here
from simulation.seeds import make_plan

_SEED_CPU_SECONDS = 120  # a run that takes more is taken for one that never ends
_LAST_SEED_SECONDS = 40  # of wall time
_SHOWN = 4  # problems of a seed


def main() -> None:
    """The command."""
    fix_hashes("simulation.campaign")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, required=True, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, required=True, help="of wall time; then no new seed begins")
    parser.add_argument("--requests", type=int, default=100, help="of each seed")
    parser.add_argument("--repeat-every", type=int, default=50, help="one in so many seeds is run twice")
    parser.add_argument("--stop-file", type=Path, help="no new seed begins while it exists")
    parser.add_argument("--plans", type=Path, help="a folder for the plans that break an invariant")
    options = parser.parse_args()
    began, total = entropy.real_seconds(), Counter[str]()
    for found in _all_seeds(options):
        total += found
    seconds = entropy.real_seconds() - began
    print(_summary(total, options, seconds), flush=True)
    sys.exit(bool(total["broken"] + total["unequal"]))


def _all_seeds(options: argparse.Namespace) -> Iterator[Counter[str]]:
    """The counts of each seed, in the order in which they end."""
    results: Any = multiprocessing.SimpleQueue()
    ends_at = entropy.real_seconds() + options.seconds
    jobs = [os.fork() or _work(number, ends_at, options, results) for number in range(options.jobs)]
    left = len(jobs)
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, options.seconds + _LAST_SEED_SECONDS)
    try:
        while left:
            found = results.get()
            if found is None:
                left -= 1
            else:
                yield Counter(found)
    except TimeoutError:
        print(f"{left} processes are still at their last seed, and are ended", flush=True)
        for job in jobs:
            os.kill(job, signal.SIGKILL)


def _raise_timeout(*_: object) -> None:
    raise TimeoutError


def _work(number: int, ends_at: float, options: argparse.Namespace, results: Any) -> int:
    """A process with each `jobs`-th seed. Never returns."""
    try:
        for seed in count(options.first + number, options.jobs):
            if entropy.real_seconds() > ends_at or (options.stop_file and options.stop_file.exists()):
                break
            results.put(dict(_run_seed(seed, options)))
    finally:
        results.put(None)
        os._exit(0)


def _run_seed(seed: int, options: argparse.Namespace) -> Counter[str]:
    number, kind = divmod(seed, len(PROFILES) - 1)
    plan = make_plan(seed, PROFILES[1 + kind], options.requests)
    is_repeated = number % options.repeat_every == 0
    outcome = _run(plan, keeps_log=is_repeated)
    found = Counter({
        "seeds": 1, "requests": outcome.requests, "cpu_ms": int(outcome.cpu_seconds * 1e3),
        "virtual": int(outcome.virtual_seconds), plan.profile: outcome.requests,
        f"{plan.profile} cpu_ms": int(outcome.cpu_seconds * 1e3), "broken": bool(outcome.problems),
    })  # fmt: skip
    if is_repeated:
        found += Counter(repeated=1)
        if outcome.log != run_elsewhere(plan):
            found["unequal"] = 1
            print(f"UNEQUAL {plan.profile} {seed}", flush=True)
    if outcome.problems:
        _tell(outcome, options)
    return found


def _run(plan: Plan, *, keeps_log: bool) -> Outcome:
    try:
        return in_child(partial(_run_bounded, plan, keeps_log=keeps_log))
    except ChildProcessError:
        return Outcome(plan, problems=[f"Simulation: crashed, or took more than {_SEED_CPU_SECONDS} s of CPU"])


def _run_bounded(plan: Plan, *, keeps_log: bool) -> Outcome:
    resource.setrlimit(resource.RLIMIT_CPU, (_SEED_CPU_SECONDS, _SEED_CPU_SECONDS))
    return run_here(plan, keeps_log=keeps_log)


def _tell(outcome: Outcome, options: argparse.Namespace) -> None:
    plan = outcome.plan
    problems = [problem[:400] for problem in outcome.problems[:_SHOWN]]
    print("FOUND " + json.dumps([plan.profile, plan.seed, len(outcome.problems), *problems]), flush=True)
    if options.plans:
        options.plans.mkdir(parents=True, exist_ok=True)
        (options.plans / f"{plan.profile}_{plan.seed}.json").write_text(plan.to_json() + "\n", encoding="utf-8")


def _summary(total: Counter[str], options: argparse.Namespace, seconds: float) -> str:
    cpu = max(total["cpu_ms"] / 1e3, 1e-9)
    profiles = ", ".join(
        f"{total[profile]} of {profile} at {total[profile] / max(total[f'{profile} cpu_ms'] / 1e3, 1e-9):.0f} a second"
        for profile in PROFILES[1:]
    )
    return (
        f"SUM from {options.first}: {total['seeds']} seeds, {total['broken']} with problems, "
        f"{total['requests']} requests ({profiles}), "
        f"{cpu:.0f} s of CPU in {seconds:.0f} s: {total['requests'] / cpu:.0f} requests a second of CPU; "
        f"{total['repeated']} twice, {total['unequal']} unequal"
    )


if __name__ == "__main__":
    main()
