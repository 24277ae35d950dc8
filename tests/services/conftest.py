"""A prefill and a decode worker in this process; whatever a test does, no block may be in use after it."""

from collections.abc import AsyncIterator, Iterator

import pytest
from support import nixl
from support.lifetimes import in_one_task
from support.worker_calls import until
from support.workers import LEASE_SECONDS, Running, Starter

from services.engines.shared_pool import SharedPool


@pytest.fixture
def start() -> Starter:
    return Starter()


@pytest.fixture
async def prefill(start: Starter) -> AsyncIterator[Running]:
    """Its blocks must be back one lease and a second after the test, at the latest."""
    async with in_one_task(start("prefill")) as running:
        yield running
        await until(lambda: running.blocks_used == 0, LEASE_SECONDS + 1)


@pytest.fixture
async def decode(start: Starter) -> AsyncIterator[Running]:
    """Its blocks must be back when the last call has ended."""
    async with in_one_task(start("decode")) as running:
        yield running
        await until(lambda: running.blocks_used == 0, 1)


@pytest.fixture
def ours() -> Iterator[SharedPool]:
    """Blocks to read those of another process into."""
    with SharedPool(nixl.BLOCKS, nixl.BLOCK_BYTES) as pool:
        yield pool
