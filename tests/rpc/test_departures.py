"""The reason that a caller has left: of its own will, or because its deadline passed."""

import pytest

from rpc.metadata import was_left_at_its_deadline


@pytest.mark.parametrize("timeout", [0.2, 1.0, 7.3, 60.0, 600.0])
def test_a_caller_whose_timeout_was_rounded_up_on_its_way_left_at_its_deadline(timeout: float) -> None:
    for remaining in (0.0, 0.01, 0.009 * timeout):
        assert was_left_at_its_deadline(remaining, timeout - remaining)


@pytest.mark.parametrize("timeout", [0.2, 1.0, 7.3, 60.0, 600.0])
def test_a_caller_with_time_left_cancelled(timeout: float) -> None:
    assert not was_left_at_its_deadline(0.1 * timeout + 0.05, 0.9 * timeout - 0.05)


def test_a_caller_without_a_deadline_cancelled() -> None:
    assert not was_left_at_its_deadline(None, 5.0)
