"""A cluster for tests of the router; see support/cluster/in_process.py."""

from collections.abc import AsyncIterator

import pytest
from support.cluster.in_process import DECODE, FAST_ROUTER, PREFILL, Bench, bench
from support.lifetimes import in_one_task


@pytest.fixture
async def pair() -> AsyncIterator[Bench]:
    """One prefill and one decode worker, both infinitely fast."""
    async with in_one_task(bench(PREFILL, DECODE)) as running:
        yield running


@pytest.fixture
async def on_grpcio() -> AsyncIterator[Bench]:
    """The same two workers and a router, all on grpcio's server: for what that does and ours does not."""
    grpcio = {"server": "grpcio"}
    workers = [worker.model_copy(update=grpcio) for worker in (PREFILL, DECODE)]
    async with in_one_task(bench(*workers, router=FAST_ROUTER.model_copy(update=grpcio))) as running:
        yield running
