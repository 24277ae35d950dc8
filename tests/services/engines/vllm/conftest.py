"""Workers on the engines of vLLM that the tests of a run share."""

from collections.abc import AsyncIterator

import pytest_asyncio
from support.cluster.in_process import PATIENT, Bench, bench
from support.engines import vllm
from support.engines.lent import lent_kind, lent_worker


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Bench]:
    """A prefill and a decode worker, and a router."""
    with vllm.installed(), lent_kind(vllm.SHARED.lend):
        async with bench(
            *(lent_worker(f"{role[0]}1", role, vllm.LEASE_SECONDS) for role in ("prefill", "decode")), router=PATIENT
        ) as running:
            yield running
