"""Fairness and quotas in the simulated world: short runs of what `python -m simulation.fairness` measures."""

import re

import pytest

from simulation.test_simulation import run_module


def measured(*arguments: str) -> str:
    done = run_module("simulation.fairness", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(300)
def test_routers_overfill_no_worker_when_requests_come_to_all_of_them_in_one_moment() -> None:
    found = measured("places")
    assert found.count("200 answers") == 2
    assert "8 routers, 200 requests in one moment: requests at a worker of 8 places: 8.000 (at most 8): holds" in found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quota_of_eight_routers_holds_while_they_are_killed() -> None:
    found = run_module("simulation.fairness", "killed", "--seconds", "50").stdout
    windows = re.findall(r"surely passed in one window: [\d.]+ \(at most 1\): (\w+)", found)
    assert windows == ["holds"] * 4, found
    # A home is killed in less than a minute: that alone may cost more than the bar of a long run.
    parts = [float(part) for part in re.findall(r"part of min\(Q, demand\): ([\d.]+)", found)]
    assert len(parts) == 2, found
    assert min(parts) >= 0.95, found
