"""SGLang's engines that the tests of a run share, and workers on them."""

from collections.abc import AsyncIterator

import pytest_asyncio
from support.cluster.in_process import PATIENT, Bench, bench
from support.engines import sglang
from support.engines.lent import lent_kind, lent_worker
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
    with sglang.installed(), lent_kind(sglang.SHARED.lend):
        workers = (lent_worker(f"{role[0]}1", role, sglang.LEASE_SECONDS) for role in ("prefill", "decode"))
        async with bench(*workers, router=PATIENT) as running:
            yield running
