"""Two routers with /v1/responses, over a prefill and a decode worker."""

from collections.abc import AsyncIterator

import pytest
from support.clients.kept_responses import (
    STEP,
    Pair,
    routers,
)
from support.cluster.in_process import simulated


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with routers(simulated("p1", "prefill", **STEP), simulated("d1", "decode", **STEP)) as found:
        yield found
