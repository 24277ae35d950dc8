"""The interpreter, which all threads share."""

import sys
import threading
import time

import pytest

from runtime.threads import in_pieces, let_others_run, switch_often


def test_python_code_in_threads_gives_the_interpreter_up_after_a_millisecond() -> None:
    before = sys.getswitchinterval()
    try:
        switch_often()
        assert sys.getswitchinterval() == 0.001
    finally:
        sys.setswitchinterval(before)


def test_a_value_is_returned_as_it_is_at_each_call() -> None:
    values = [object() for _ in range(100)]
    assert [let_others_run(value) for value in values] == values


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sleeps of whoever lets others run."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


async def test_an_event_loop_does_not_wait_for_threads_that_compute(slept: list[float]) -> None:
    for _ in range(100):
        let_others_run(None)
    assert not slept


def test_a_thread_lets_others_run_at_some_of_many_calls(slept: list[float]) -> None:
    thread = threading.Thread(target=lambda: [let_others_run(None) for _ in range(100)])
    thread.start()
    thread.join()
    assert len(slept) >= 3


@pytest.mark.parametrize("count", [0, 1, 32_768, 100_000])
def test_the_pieces_of_ids_are_all_of_them_in_their_order(count: int) -> None:
    pieces = [*in_pieces(range(count))]
    assert [each for piece in pieces for each in piece] == [*range(count)]
    assert all(0 < len(piece) <= 32_768 for piece in pieces)
