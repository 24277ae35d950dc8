"""The answer that calls must give however their workers fail."""

import asyncio

import pytest
from support.cluster.in_process import DECODE, PREFILL, Stream, bench
from support.servers.broken_worker import LONG


@pytest.fixture(scope="package")
def undisturbed() -> Stream:
    """The answer to LONG of a cluster in which nothing goes wrong, asked for once."""

    async def ask() -> Stream:
        async with bench(PREFILL, DECODE) as running:
            return await running.generate(**LONG)

    return asyncio.run(ask())
