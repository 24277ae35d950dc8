"""Workers on the engines of vLLM that the tests of a run share."""

from collections.abc import AsyncIterator

import pytest_asyncio
from support.cluster.in_process import PATIENT, Bench, bench
from support.engines import vllm


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Bench]:
    """A prefill and a decode worker, and a router."""
    with vllm.installed(), vllm.lent_kind():
        async with bench(
            vllm.lent_worker("p1", "prefill"), vllm.lent_worker("d1", "decode"), router=PATIENT
        ) as running:
            yield running
