"""Routers that serve OpenAI's API too, and the official client of it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
from openai import AsyncOpenAI
from support.cluster.in_process import PATIENT, Bench, bench
from support.engines.checkpoints import DEMO
from support.engines.written_engine import HERMES_TEMPLATE

from engine_protocol.roles import Role
from router.config import OpenAIConfig, RouterConfig
from services.config import WorkerConfig
from services.engines.pytorch.config import PyTorchConfig

# No connection outlives its test.
ALONE = {"connection": "close"}
OPENAI_ROUTER = PATIENT.model_copy(update={"openai": OpenAIConfig(listen="127.0.0.1:0")})


@asynccontextmanager
async def openai_bench(
    *workers: WorkerConfig, router: RouterConfig = OPENAI_ROUTER, proxied: bool = False
) -> AsyncIterator[Bench]:
    """A router that serves OpenAI's API, and these workers. `proxied` for tests that cut connections to them."""
    async with bench(*workers, router=router, proxied=proxied) as running:
        yield running


def tools_worker(folder: Path, *roles: Role) -> WorkerConfig:
    """A worker of the demo model, with a chat template that takes tools, which is written into the folder."""
    template = folder / "hermes.jinja"
    template.write_text(HERMES_TEMPLATE)
    engine = PyTorchConfig(model=DEMO, name="demo", threads=1, kv_cache_bytes=16 << 20)
    return WorkerConfig(worker_id="w1", roles=roles, engine=engine, chat_template=template, drain_seconds=0)


def url_of(running: Bench) -> str:
    return f"http://{running.openai_address}/v1"


def client_of(running: Bench, api_key: str = "any", max_retries: int = 0, **options: object) -> AsyncOpenAI:
    """The official client, which leaves retries to the test."""
    return AsyncOpenAI(
        base_url=url_of(running), api_key=api_key, max_retries=max_retries, timeout=30, default_headers=ALONE, **options
    )  # type: ignore[arg-type]


async def post(running: Bench, path: str, body: object, **headers: str) -> httpx2.Response:
    """A body of the test's choice: bytes as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx2.AsyncClient(trust_env=False, timeout=30) as http:
        return await http.post(f"{url_of(running)}{path}", content=content, headers=headers)
