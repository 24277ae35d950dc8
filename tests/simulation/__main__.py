"""Runs seeds and plan files: `python -m simulation --seeds 0:200 --profile clients`. Exit code 1 if one fails."""

# Before anything of Baton: its clocks are bound when it is imported.
from simulation import entropy  # isort: skip

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from simulation.elsewhere import run_elsewhere
from simulation.hashes import fix_hashes
from simulation.plan import PROFILES, Plan, read_plan
from simulation.running import Outcome, run, run_all
from simulation.seeds import make_plan
from simulation.shrink import Shrinker

PLANS = Path(__file__).parent / "plans"


def main() -> None:
    """The command."""
    fix_hashes("simulation")
    options = _options()
    if options.shrink is not None:
        _shrink(options)
        return
    if options.log:
        plan = next(_plans(options))
        outcome = run(plan, keeps_log=True)
        Path(options.log).write_text(outcome.log, encoding="utf-8")
        _report(outcome, is_quiet=False)
        sys.exit(bool(outcome.problems))
    failed = _repeated(options) if options.repeat else 0
    sys.exit(bool(failed + _run_seeds(options)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:20", help="FIRST:LAST, FIRST: for ever, or one")
    parser.add_argument("--profile", choices=(*PROFILES, "all"), default="all", help="`all` takes them in turn")
    parser.add_argument("--requests", type=int, default=50, help="of each seed")
    parser.add_argument("--plan", type=Path, nargs="*", default=[], help="files, in the place of seeds")
    parser.add_argument("--kept", action="store_true", help="first the plans that have found something once")
    parser.add_argument(
        "--repeat", type=int, default=0, help="so many seeds, from FIRST on, run twice, and are compared"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of CPU; then no new seed begins")
    parser.add_argument("--log", help="a file for the event log of one seed")
    parser.add_argument("--shrink", type=int, help="prints the smallest plan of a seed, and writes it into plans/")
    parser.add_argument("--stop", action="store_true", help="at the first that finds something")
    parser.add_argument("--quiet", action="store_true", help="no line for a seed that finds nothing")
    return parser.parse_args()


def _plans(options: argparse.Namespace) -> Iterator[Plan]:
    if options.kept:
        yield from map(read_plan, sorted(PLANS.glob("*.json")))
    if options.plan:
        yield from map(read_plan, options.plan)
        return
    first, colon, last = options.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1)) if last or not colon else count(int(first))
    for seed in seeds:
        profile = PROFILES[seed % len(PROFILES)] if options.profile == "all" else options.profile
        yield make_plan(seed, profile, options.requests)


def _run_seeds(options: argparse.Namespace) -> int:
    began, total, codes, failed = entropy.real_seconds(), Counter[str](), Counter[str](), 0
    for outcome in run_all(_plans(options), options.seconds):
        codes += outcome.codes
        total["seeds"] += 1
        total["requests"] += outcome.requests
        total["faulted"] += outcome.requests if outcome.plan.profile != "plain" else 0
        total["cpu"] += int(outcome.cpu_seconds * 1e3)
        total["virtual"] += int(outcome.virtual_seconds)
        failed += bool(outcome.problems)
        _report(outcome, is_quiet=options.quiet)
        if outcome.problems and options.stop:
            break
    cpu = max(total["cpu"] / 1e3, 1e-9)
    print(
        f"{total['seeds']} seeds, {failed} with problems, {total['requests']} requests ({total['faulted']} faulted), "
        f"{cpu:.0f} s of CPU: {total['requests'] / cpu:.0f} requests a second, "
        f"virtual:real {total['virtual'] / cpu:.0f}, "
        f"{entropy.real_seconds() - began:.0f} s; {dict(codes)}"
    )
    return failed


def _repeated(options: argparse.Namespace) -> int:
    """Runs seeds here and in another process, with their logs. Returns how many differ."""
    differ, first = 0, int(options.seeds.partition(":")[0])
    for seed in range(first, first + options.repeat):
        plan = make_plan(seed, PROFILES[1 + seed % 3], options.requests)
        one, other = run(plan, keeps_log=True).log, run_elsewhere(plan)
        if one != other:
            differ += 1
            pairs = zip(one.split("\n"), other.split("\n"), strict=False)
            print(f"seed {seed} differs at {next((pair for pair in pairs if pair[0] != pair[1]), 'its end')}")
    print(f"{options.repeat} seeds twice: {differ} differ")
    return differ


def _report(outcome: Outcome, *, is_quiet: bool) -> None:
    plan = outcome.plan
    if is_quiet and not outcome.problems:
        return
    print(
        f"{plan.profile} {plan.seed}: {outcome.digest[:12]}, {outcome.requests} requests, {len(plan.faults)} faults, "
        f"{outcome.cpu_seconds:.2f} s of CPU, {outcome.virtual_seconds:.0f} s virtual, {dict(outcome.codes)}",
        flush=True,
    )
    for problem in outcome.problems[:6]:
        print(f"    {problem}", flush=True)
    if outcome.problems:
        print(f"    again: make simulate SEEDS={plan.seed} PROFILE={plan.profile} LOG=run.log", flush=True)


def _shrink(options: argparse.Namespace) -> None:
    profile = PROFILES[options.shrink % len(PROFILES)] if options.profile == "all" else options.profile
    plan = read_plan(options.plan[0]) if options.plan else make_plan(options.shrink, profile, options.requests)
    shrinker = Shrinker(plan)
    smallest = replace(shrinker.shrink(), notes=shrinker.kind)
    counts = f"{len(smallest.requests)} requests, {len(smallest.faults)} faults"
    print(f"{shrinker.kind or 'nothing'} in {shrinker.runs} runs: {counts}")
    if shrinker.kind:
        PLANS.mkdir(exist_ok=True)
        file = PLANS / f"{plan.profile}_{plan.seed}_{shrinker.kind}.json"
        file.write_text(smallest.to_json() + "\n", encoding="utf-8")
        print(smallest.to_json())
        print(f"written to {file}")


if __name__ == "__main__":
    main()
