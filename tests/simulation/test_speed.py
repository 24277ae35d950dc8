"""The simulated engine with a measured profile is as fast as the engine was, also with many prompts at a time."""

import re

import pytest

from simulation.test_simulation import run_module

AT_MOST = 15.0  # per cent


@pytest.mark.timeout(120)
def test_the_simulated_engine_with_a_profile_is_near_the_sweep_of_the_measured_one() -> None:
    done = run_module("simulation.speed")
    assert done.returncode == 0, done.stderr[-3000:]
    errors = [float(error) for error in re.findall(r"([+-][\d.]+)%", done.stdout)]
    assert len(errors) == 9, done.stdout
    assert max(map(abs, errors)) < AT_MOST, done.stdout
