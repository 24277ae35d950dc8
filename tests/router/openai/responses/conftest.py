"""Two routers with /v1/responses, over a prefill and a decode worker."""

from collections.abc import AsyncIterator

import pytest
from support.clients.kept_responses import (
    STEP,
    Pair,
    routers,
)
from support.cluster.in_process import simulated
from support.lifetimes import in_one_task


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    workers = simulated("p1", "prefill", **STEP), simulated("d1", "decode", **STEP)
    async with in_one_task(routers(*workers)) as found:
        yield found
