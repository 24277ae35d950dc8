"""The fleet in virtual time: a sample of seeds, the plans that have found something, and the same log twice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.mutants import Mutant, hunt, plant, read
from simulation.plan import PROFILES, from_values, make_plan

ROOT = Path(__file__).resolve().parents[2]
_SAMPLE_SECONDS = 30


def simulate(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command in a process of its own, which binds virtual clocks before it imports Baton."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    command = [sys.executable, "-m", "simulation", *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.mark.timeout(300)
def test_no_seed_of_a_sample_and_no_kept_plan_breaks_an_invariant() -> None:
    done = simulate("--kept", "--seeds", "0:", "--seconds", str(_SAMPLE_SECONDS), "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("profile", ["clients", "one_fault", "storm"])
def test_a_seed_gives_the_same_log_in_two_processes(profile: str, tmp_path: Path) -> None:
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    for log in logs:
        simulate("--seeds", "7", "--profile", profile, "--log", str(log))
    first, second = (log.read_bytes() for log in logs)
    assert len(first) > 10_000
    assert first == second


def test_a_plan_is_the_same_after_it_was_written_and_read() -> None:
    import json

    for profile in PROFILES:
        plan = make_plan(3, profile)
        assert from_values(json.loads(plan.to_json())) == plan


@pytest.mark.parametrize("mutant", read(), ids=lambda mutant: mutant.name)
def test_each_planted_bug_has_its_place(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert mutant.new != mutant.old


@pytest.mark.timeout(300)
def test_a_planted_bug_is_found() -> None:
    mutant = next(each for each in read() if each.name == "decode_skips_the_confirmation")
    is_found, lines = hunt(mutant, 100, "0:")
    assert is_found, lines
    assert "KvIsConfirmed" in lines


def test_a_bug_without_its_place_is_refused(tmp_path: Path) -> None:
    mutant = Mutant("x", "nothing", "runtime/clock.py", "not there", "")
    with pytest.raises(ValueError, match="occurs 0 times"):
        plant(mutant, tmp_path)
