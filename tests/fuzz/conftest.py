"""A cluster that lives as long as a file's tests, in a loop of their own."""

import asyncio
from collections.abc import Iterator

import pytest
from support.fuzz_target import Target, fuzzed_cluster


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    loop = asyncio.new_event_loop()
    cluster = fuzzed_cluster(loop)
    try:
        yield loop.run_until_complete(cluster.__aenter__())
        loop.run_until_complete(cluster.__aexit__(None, None, None))
    finally:
        loop.close()
