"""The embedded engine in virtual time, with tiers, loans, kept memory and deaths: a sample of seeds."""

import pytest

from simulation.test_simulation import run_module


@pytest.mark.timeout(120)
def test_no_seed_of_a_sample_breaks_what_must_hold() -> None:
    done = run_module("simulation.embedded", "--seeds", "0:60")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "0 seeds failed" in done.stdout
    for happened in ("'loaded'", "'lent'", "'deaths'", "'left whole'", "'HeldDecode'"):
        assert happened in done.stdout
