"""A worker's load between its reports."""

from router.workers.watching.report_stream import CorrectedLoad


def test_what_has_ended_since_it_was_reported_is_not_counted() -> None:
    load = CorrectedLoad()
    load.add(4)
    load.reported(4)
    load.remove(1)
    load.add(1)
    load.remove(4)
    # Counted when there were four.
    load.reported(4)
    assert (load.value, load.elsewhere) == (0, 0)


def test_what_was_sent_after_it_was_reported_is_counted() -> None:
    load = CorrectedLoad()
    load.reported(0)
    load.add(3)
    load.reported(0)
    assert load.value == 3


def test_requests_of_others_are_counted_until_they_are_not_reported_any_more() -> None:
    load = CorrectedLoad()
    load.add(2)
    load.reported(7)
    assert (load.value, load.elsewhere) == (7, 5)
    load.remove(2)
    assert load.value == 5
    load.reported(0)
    load.reported(0)
    assert load.value == 0


def test_less_is_believed_where_this_routers_requests_have_ended_there() -> None:
    """Their clients still read what they had generated."""
    load = CorrectedLoad()
    load.add(5)
    load.reported(5)
    load.reported(2)
    assert load.value == 2
