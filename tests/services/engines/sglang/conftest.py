"""SGLang's engines that the tests of a run share, and workers on them."""

from collections.abc import AsyncIterator

import pytest_asyncio
from support.cluster.in_process import PATIENT, Bench, bench
from support.engines import sglang
from support.eventually import eventually

from services.engines.sglang.engine import SglangEngine


@pytest_asyncio.fixture
async def prefill() -> AsyncIterator[SglangEngine]:
    with sglang.installed():
        async with sglang.SHARED.lend("prefill", "decode") as engine:
            assert isinstance(engine, SglangEngine)
            yield engine
            await eventually(lambda: engine.load().blocks_used == 0)


@pytest_asyncio.fixture
async def decode() -> AsyncIterator[SglangEngine]:
    with sglang.installed():
        async with sglang.SHARED.lend("decode", "prefill") as engine:
            assert isinstance(engine, SglangEngine)
            yield engine
            await eventually(lambda: engine.load().blocks_used == 0)


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Bench]:
    """A prefill and a decode worker, and a router."""
    with sglang.installed(), sglang.lent_kind():
        workers = sglang.lent_worker("p1", "prefill"), sglang.lent_worker("d1", "decode")
        async with bench(*workers, router=PATIENT) as running:
            yield running
