"""A cluster for all tests of a file, on their own event loop."""

import asyncio
from collections.abc import Iterator

import pytest
from support.clients.fuzz_target import Target, fuzzed_cluster


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    loop = asyncio.new_event_loop()
    cluster = fuzzed_cluster(loop)
    try:
        yield loop.run_until_complete(cluster.__aenter__())
        loop.run_until_complete(cluster.__aexit__(None, None, None))
    finally:
        loop.close()
