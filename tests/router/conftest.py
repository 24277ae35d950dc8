"""A cluster for tests of the router; see support/cluster/in_process.py."""

from collections.abc import AsyncIterator

import pytest
from support.cluster.in_process import DECODE, PREFILL, Bench, bench
from support.lifetimes import in_one_task


@pytest.fixture
async def pair() -> AsyncIterator[Bench]:
    """One prefill and one decode worker, both infinitely fast."""
    async with in_one_task(bench(PREFILL, DECODE)) as running:
        yield running
