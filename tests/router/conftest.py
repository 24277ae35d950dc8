"""A cluster for tests of the router; see support/bench.py."""

from collections.abc import AsyncIterator

import pytest
from support.bench import DECODE, FAST_ROUTER, PREFILL, Bench, OpenBench, Stream, bench, eventually, simulated

__all__ = ["DECODE", "FAST_ROUTER", "PREFILL", "Bench", "OpenBench", "Stream", "bench", "eventually", "simulated"]


@pytest.fixture
async def pair() -> AsyncIterator[Bench]:
    """One prefill and one decode worker, both infinitely fast."""
    async with bench(PREFILL, DECODE) as running:
        yield running
