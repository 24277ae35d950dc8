"""The fleet in virtual time: a sample of seeds, the plans that have found something, and the same log twice."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.mutants import INVARIANTS_FILE, Mutant, read
from simulation.plan import PROFILES, from_values
from simulation.seeds import make_plan

ROOT = Path(__file__).resolve().parents[2]
_SAMPLE_SECONDS = 5
_PARTS = 3  # of the planted bugs, each of which is imported anew
WITH_KEEPERS = 5  # a storm in which workers with keepers are killed and upgraded


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs a process of its own, which binds virtual clocks before it imports Baton."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "PYTHONHASHSEED": "0"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)


def run_module(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return python("-m", module, *arguments)


def simulate(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_module("simulation", *arguments)


@pytest.mark.timeout(300)
def test_no_seed_of_a_sample_and_no_kept_plan_breaks_an_invariant() -> None:
    done = simulate("--kept", "--seeds", "0:", "--seconds", str(_SAMPLE_SECONDS), "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "plan",
    [
        ("--seeds", str(WITH_KEEPERS), "--profile", "storm", "--requests", "25"),
        # Its tenants' counters are equal: in the order of a message's map, processes served them in different orders.
        ("--plan", str(ROOT / "tests/simulation/plans/clients_tenants_of_equal_counters.json")),
    ],
    ids=["keepers", "tenants"],
)
def test_a_plan_gives_the_same_log_in_two_processes(tmp_path: Path, plan: tuple[str, ...]) -> None:
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    for log in logs:
        simulate(*plan, "--log", str(log))
    first, second = (log.read_bytes() for log in logs)
    assert len(first) > 10_000
    assert first == second


@pytest.mark.timeout(300)
def test_seeds_of_each_profile_give_the_same_log_twice() -> None:
    done = simulate("--repeat", "3", "--seeds", "0:0", "--requests", "15")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "3 seeds twice: 0 differ" in done.stdout


def test_a_seed_with_keepers_has_them() -> None:
    plan = make_plan(WITH_KEEPERS, "storm", 25)
    assert plan.fleet.keeps
    assert {fault.kind for fault in plan.faults} >= {"kill", "roll_out", "reconfigure"}


def test_a_plan_is_the_same_after_it_was_written_and_read() -> None:
    import json

    for profile in PROFILES:
        plan = make_plan(3, profile)
        assert from_values(json.loads(plan.to_json())) == plan


@pytest.mark.parametrize("mutant", [*read(), *read(INVARIANTS_FILE)], ids=lambda mutant: mutant.name)
def test_each_planted_bug_has_its_place(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert mutant.new != mutant.old


def test_each_invariant_has_a_planted_bug() -> None:
    names = {mutant.invariant for mutant in read(INVARIANTS_FILE)}
    listed = re.findall(r"^    (\w+),$", (ROOT / "tests/simulation/invariants/__init__.py").read_text(), re.MULTILINE)
    assert names == set(listed)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(_PARTS))
def test_each_invariant_finds_the_bug_that_is_planted_for_it(part: int) -> None:
    names = [mutant.name for mutant in read(INVARIANTS_FILE)[part::_PARTS]]
    done = run_module("simulation.mutants", "--invariants", "--seconds", "15", *names)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_a_bug_without_its_place_is_refused() -> None:
    program = (
        "from simulation.mutants import Mutant, plant\n"
        "plant(Mutant('x', 'nothing', 'runtime/clock.py', 'not there', ''))"
    )
    done = python("-c", program)
    assert "occurs 0 times" in done.stderr
