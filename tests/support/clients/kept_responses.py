"""Clients of /v1/responses at two routers before the same workers, and the answers that they read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
from support.clients.openai_api import ALONE, OPENAI_ROUTER, openai_bench
from support.cluster.in_process import Bench
from support.eventually import eventually

from router.config import OpenAIConfig, RouterConfig, StoredResponsesConfig
from router.server import Router, host_router
from services.config import WorkerConfig

STEP = {"decode_step_seconds": 0.005}
ASKED: dict[str, Any] = {"model": "demo", "input": "hello", "max_output_tokens": 40, "temperature": 0}
TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


def client(address: str, key: str = "any", **headers: str) -> openai.AsyncOpenAI:
    base = f"http://{address}/v1"
    return openai.AsyncOpenAI(
        base_url=base, api_key=key, max_retries=0, timeout=30, default_headers={**ALONE, **headers}
    )


@dataclass
class Pair:
    """Two routers before the same workers, and a client of each."""

    running: Bench
    other: Router
    stop_other: AsyncExitStack

    @property
    def first(self) -> openai.AsyncOpenAI:
        return client(self.running.openai_address)

    @property
    def second(self) -> openai.AsyncOpenAI:
        return client(self.other.openai_address)


def router_with(**responses: Any) -> RouterConfig:
    stored = StoredResponsesConfig(**responses)
    return OPENAI_ROUTER.model_copy(update={"openai": OpenAIConfig(listen="127.0.0.1:0", responses=stored)})


@asynccontextmanager
async def routers(*workers: WorkerConfig, router: RouterConfig = OPENAI_ROUTER) -> AsyncIterator[Pair]:
    async with openai_bench(*workers, router=router) as running, AsyncExitStack() as stack:
        other = await stack.enter_async_context(host_router(router, running.registry))
        await eventually(lambda: sum(not worker.problem for worker in other.cluster.workers) == len(workers))
        yield Pair(running, other, stack)


async def ended(of: openai.AsyncOpenAI, identity: str) -> Any:
    for _ in range(1000):
        found = await of.responses.retrieve(identity)
        if found.status not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("the response has not ended")


async def events_of(stream: Any, until: int = 10**9) -> list[Any]:
    found: list[Any] = []
    async with stream:
        async for event in stream:
            found.append(event)
            if len(found) >= until:
                break
    return found


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")
