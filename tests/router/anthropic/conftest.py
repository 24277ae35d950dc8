"""A router with Anthropic's API, over a prefill and a decode worker."""

from collections.abc import AsyncIterator

import pytest
from support.clients.openai_api import openai_bench
from support.cluster.in_process import DECODE, PREFILL, Bench
from support.lifetimes import in_one_task


@pytest.fixture
async def served() -> AsyncIterator[Bench]:
    """One prefill and one decode worker, both infinitely fast."""
    async with in_one_task(openai_bench(PREFILL, DECODE)) as running:
        yield running
