"""The end of a router that keeps responses: every task has ended, and nothing is logged as lost."""

import asyncio
import gc
import logging
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx2
import openai
import pytest
from support.clients.openai_api import ALONE, OPENAI_ROUTER, openai_bench
from support.cluster.in_process import simulated
from support.eventually import eventually

from router.config import StoredResponsesConfig
from router.openai.call import HttpCall
from router.openai.stored.service import ResponseService
from router.request_path import open_request_path
from router.routing.policies import load_policy
from router.server import host_router

ASKED: dict[str, Any] = {"model": "demo", "input": "hello", "max_output_tokens": 2000, "background": True}
STEP = {"decode_step_seconds": 0.01}
WORKERS = (simulated("p1", "prefill", **STEP), simulated("d1", "decode", **STEP))


def client(address: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://{address}/v1", api_key="any", max_retries=0, timeout=30, default_headers=ALONE
    )


def adopting() -> "list[asyncio.Task[Any]]":
    return [task for task in asyncio.all_tasks() if "adopt" in getattr(task.get_coro(), "__qualname__", "")]


async def test_a_response_that_is_being_taken_over_has_ended_with_the_service() -> None:
    async with openai_bench(*WORKERS) as running:
        made = await client(running.openai_address).responses.create(**ASKED)
        policy = load_policy(OPENAI_ROUTER.routing)
        async with open_request_path(OPENAI_ROUTER, running.cluster, policy, None) as path:
            async with ResponseService(path, StoredResponsesConfig()) as service:
                finding = asyncio.create_task(service.find(made.id, HttpCall({"headers": []}, never, never)))
                while not len(service.table):  # noqa: ASYNC110
                    await asyncio.sleep(0)  # the task that takes it over is to be ended before it goes on
            assert adopting() == []
            with suppress(asyncio.CancelledError):
                await finding


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05])
async def test_no_task_is_left_and_nothing_is_lost(seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    """The second router ends in the midst of taking responses over, at one time or another."""
    with caplog.at_level(logging.ERROR, "asyncio"):
        async with openai_bench(*WORKERS) as running, AsyncExitStack() as stack:
            other = await stack.enter_async_context(host_router(OPENAI_ROUTER, running.registry))
            await eventually(lambda: sum(not worker.problem for worker in other.cluster.workers) == 2)
            made = [await client(running.openai_address).responses.create(**ASKED) for _ in range(3)]
            reading = [asyncio.create_task(read(other.openai_address, one.id)) for one in (*made, *made)]
            forged = made[0].id[:-4] + "AAAA"
            reading.append(asyncio.create_task(read(other.openai_address, forged)))
            await asyncio.sleep(seconds)
            await stack.aclose()
            await asyncio.gather(*reading)
        assert adopting() == []
        gc.collect()
    assert [record.getMessage() for record in caplog.records] == []


async def read(address: str, identity: str) -> None:
    with suppress(httpx2.HTTPError):
        async with httpx2.AsyncClient(trust_env=False, timeout=30) as http:
            await http.get(f"http://{address}/v1/responses/{identity}")


async def never(*_: object) -> Any:
    await asyncio.Event().wait()
