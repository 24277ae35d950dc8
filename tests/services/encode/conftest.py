"""Encode, prefill and decode workers with the simulated engine. After each test nothing may be held."""

from collections.abc import AsyncIterator

import pytest
from support.clients.image_calls import HIDDEN_SIZE, IMAGE_TOKENS
from support.cluster.workers import LEASE_SECONDS, Running, Starter
from support.eventually import eventually

from services.config import EncodeConfig

IMAGES = {"image_tokens": IMAGE_TOKENS, "image_hidden_size": HIDDEN_SIZE}


@pytest.fixture
def start() -> Starter:
    return Starter()


@pytest.fixture
async def encode(start: Starter) -> AsyncIterator[Running]:
    """Leases every embedding. All blocks must be free when a lease has passed after the test."""
    async with start("encode", encode=EncodeConfig(inline_bytes=0, pool_bytes=64 * 1024), **IMAGES) as running:
        yield running
        running.let_a_lease_pass()
        await eventually(lambda: running.blocks_used == 0, LEASE_SECONDS / 2)


@pytest.fixture
async def inline(start: Starter) -> AsyncIterator[Running]:
    """Sends every embedding inline."""
    async with start("encode", **IMAGES) as running:
        yield running
        assert running.blocks_used == 0


@pytest.fixture
async def prefill(start: Starter) -> AsyncIterator[Running]:
    async with start("prefill", **IMAGES) as running:
        yield running
        running.let_a_lease_pass()
        await eventually(lambda: running.blocks_used == 0, LEASE_SECONDS / 2)


@pytest.fixture
async def decode(start: Starter) -> AsyncIterator[Running]:
    async with start("decode", **IMAGES) as running:
        yield running
        await eventually(lambda: running.blocks_used == 0, LEASE_SECONDS / 2)
