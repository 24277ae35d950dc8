"""The shared parts of the tests of several engines."""

from collections.abc import AsyncIterator

import pytest_asyncio
from support.engines import sglang, vllm


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def end_of_vllm() -> AsyncIterator[None]:
    """Ends the engines of vLLM that the tests of this run have shared."""
    yield
    await vllm.SHARED.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def end_of_sglang() -> AsyncIterator[None]:
    """Ends the engines of SGLang that the tests of this run have shared."""
    yield
    await sglang.SHARED.close()
