"""A prefill and a decode worker in this process. After each test all of their blocks must be free."""

from collections.abc import AsyncIterator, Iterator

import pytest
from support.cluster.workers import LEASE_SECONDS, Running, Starter
from support.eventually import eventually
from support.lifetimes import in_one_task
from support.transports import nixl

from services.engines.memory.shared_pool import SharedPool


@pytest.fixture
def start() -> Starter:
    return Starter()


@pytest.fixture
async def prefill(start: Starter) -> AsyncIterator[Running]:
    """All blocks must be free when a lease has passed after the test."""
    async with in_one_task(start("prefill")) as running:
        yield running
        running.let_a_lease_pass()
        await eventually(lambda: running.blocks_used == 0, LEASE_SECONDS / 2)


@pytest.fixture
async def decode(start: Starter) -> AsyncIterator[Running]:
    """All blocks must be free when the last call has ended."""
    async with in_one_task(start("decode")) as running:
        yield running
        await eventually(lambda: running.blocks_used == 0, LEASE_SECONDS / 2)


@pytest.fixture
def ours() -> Iterator[SharedPool]:
    """Blocks to read those of another process into."""
    with SharedPool(nixl.BLOCKS, nixl.BLOCK_BYTES) as pool:
        yield pool
