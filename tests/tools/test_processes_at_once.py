"""The number of processes that `make test` uses by default."""

import pytest
from support import at_once
from support.at_once import processes_at_once

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cores", "gibibytes", "processes"),
    [(2, 16, 3), (8, 64, 9), (2, 6, 2), (16, 16, 5), (1, 8, 2), (1, 1, 1)],
)
def test_there_is_one_more_than_cores_unless_memory_is_scarce(cores: int, gibibytes: int, processes: int) -> None:
    assert processes_at_once(cores, gibibytes * GIB) == processes


def test_pytest_asks_for_it(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_once, "available_bytes", lambda: 6 * GIB + 1)
    monkeypatch.setattr(at_once, "_cores", lambda: 64)
    assert pytestconfig.hook.pytest_xdist_auto_num_workers(config=pytestconfig) == 2
