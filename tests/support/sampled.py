"""The cases of a test that repeats one law: `make test` has a sample of them, `make check-all` has all."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], sample: Iterable[Any], names: Callable[[Any], str] = str) -> list[Any]:
    """The arguments of `pytest.mark.parametrize`: all cases, of which those outside of the sample are slow.

    docs/decisions/tooling.md lists each test that has a sample. Raises ValueError if the sample is empty or has
    other cases.
    """
    cases, sample = list(cases), list(sample)
    if not sample:
        raise ValueError("an empty sample: the law would have no test")
    if unknown := [each for each in sample if each not in cases]:
        raise ValueError(f"not among the cases: {unknown}")
    slow = pytest.mark.slow
    return [pytest.param(case, id=names(case), marks=() if case in sample else (slow,)) for case in cases]
