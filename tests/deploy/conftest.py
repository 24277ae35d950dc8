"""Envoy before two routers, which all tests of a file share."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.cluster.behind_envoy import Edge, open_edge
from support.lifetimes import in_one_task


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    async with in_one_task(open_edge(tmp_path_factory.mktemp("envoy"))) as running:
        yield running
