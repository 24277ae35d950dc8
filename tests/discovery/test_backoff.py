"""Waits between attempts grow, stay bounded, differ, and begin anew after a success."""

from discovery.backoff import Backoff


def test_each_wait_is_half_to_all_of_a_bound_that_doubles() -> None:
    backoff = Backoff(first_seconds=0.1, max_seconds=0.8)
    waits = [backoff.next_seconds() for _ in range(5)]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(waits, [0.1, 0.2, 0.4, 0.8, 0.8], strict=True))


def test_two_that_began_together_do_not_stay_in_step() -> None:
    assert Backoff().next_seconds() != Backoff().next_seconds()


def test_it_begins_anew_after_a_success() -> None:
    backoff = Backoff(first_seconds=0.1)
    for _ in range(5):
        backoff.next_seconds()
    backoff.reset()
    assert backoff.next_seconds() <= 0.1
