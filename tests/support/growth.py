"""The growth of a computation's time with its input."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Input = TypeVar("Input")

_LEAST_SECONDS = 2e-3  # shorter times are mostly noise
_ENOUGH_SECONDS = 0.5
_TRIES = 5


def growth(work: Callable[[Input], object], inputs: Sequence[Input]) -> float:
    """The ratio of the times for the last and the first of `inputs`; times below 2 ms count as 2 ms.

    Stops with the ratio so far at an input that takes half a second, so that work that is exponential ends too, if the
    inputs grow slowly where they are short.
    """
    times: list[float] = []
    for one in inputs:
        times.append(max(_LEAST_SECONDS, _seconds(work, one)))
        if times[-1] > _ENOUGH_SECONDS:
            break
    return times[-1] / times[0]


def _seconds(work: Callable[[Input], object], one: Input) -> float:
    """The CPU time, to which other processes add nothing; the least of several runs."""
    least = float("inf")
    for _ in range(_TRIES):
        started = time.thread_time()
        work(one)
        least = min(least, time.thread_time() - started)
        if least < _LEAST_SECONDS or least > _ENOUGH_SECONDS:
            break
    return least
