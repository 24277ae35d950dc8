"""The garbage collector does not stop the event loop to look at what lives."""

import gc

from runtime.garbage import collect_rarely


def test_a_million_objects_that_live_are_not_all_looked_at_again() -> None:
    before = gc.get_threshold()
    gc.collect()
    full = gc.get_stats()[2]["collections"]
    collect_rarely()
    try:
        living = [[number] for number in range(2_000_000)]
        assert gc.get_stats()[2]["collections"] == full
        assert len(living) == 2_000_000
    finally:
        gc.set_threshold(*before)
