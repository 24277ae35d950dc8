"""Envoy with the changes that docs/production.md describes: TLS on both sides, another rate limit."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc import aio
from support.certificates import Authority, Pair
from support.clients.generation import generate, greedy_text
from support.cluster.in_process import FAST_ROUTER, simulated
from support.eventually import eventually
from support.servers.envoy import CONFIG, Change, Envoy, running_envoy

from baton.inference.v1 import model_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from discovery.memory import MemoryRegistry
from router.config import RouterConfig
from router.server import host_router
from rpc.auth.tls import TlsConfig
from rpc.channels import open_channel
from services.server import host_worker

FRAGMENTS = CONFIG.parent / "tls.yaml"
WHOLE = simulated("w1", "prefill", "decode")
ASKED = greedy_text("Sort: pear apple mango", 12)


@asynccontextmanager
async def edge(folder: Path, change: Change, config: RouterConfig = FAST_ROUTER) -> AsyncIterator[Envoy]:
    """An Envoy before a router and a worker."""
    registry = MemoryRegistry("test")
    async with host_worker(WHOLE, registry), host_router(config, registry) as router:
        await eventually(lambda: any(not worker.problem for worker in router.cluster.workers))
        async with running_envoy(folder, [router.address], change=change) as envoy:
            yield envoy


def with_tls(authority: Authority, own: Pair) -> Change:
    """Puts the fragments where their comments say, with these files."""
    files = {"envoy.pem": own.cert, "envoy-key.pem": own.key, "ca.pem": authority.ca}
    text = FRAGMENTS.read_text()
    for name, path in files.items():
        text = text.replace(f"/etc/baton/{name}", str(path))
    fragments = yaml.safe_load(text)

    def change(config: dict[str, Any]) -> None:
        _named(config, "listeners", "clients")["filter_chains"][0].update(fragments["clients"])
        _named(config, "clusters", "routers").update(fragments["routers"])

    return change


def _named(config: dict[str, Any], kind: str, name: str) -> Any:
    return next(each for each in config["static_resources"][kind] if each["name"] == name)


async def test_with_tls_on_both_sides_answers_come_and_strangers_get_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "test")
    own = authority.issue("envoy", uris=["baton://client/envoy"])
    pair = authority.issue("router", uris=["baton://worker/router"])
    config = FAST_ROUTER.model_copy(
        update={"tls": FAST_ROUTER.tls.model_copy(update={"listen": TlsConfig(ca=authority.ca, **_files(pair))})}
    )
    async with edge(tmp_path, with_tls(authority, own), config) as envoy:
        async with open_channel(envoy.address, TlsConfig(ca=authority.ca)) as channel:
            answer = await generate(InferenceServiceStub(channel), ASKED)
            assert len(answer.ids) == 12
        async with open_channel(envoy.address) as plain:
            with pytest.raises(aio.AioRpcError) as caught:
                await InferenceServiceStub(plain).ListModels(model_pb2.ListModelsRequest(), timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def _files(pair: Pair) -> dict[str, Any]:
    return {"cert": pair.cert, "key": pair.key}


async def test_over_the_rate_limit_a_client_gets_resource_exhausted(tmp_path: Path) -> None:
    def three_a_minute(config: dict[str, Any]) -> None:
        (manager,) = _named(config, "listeners", "clients")["filter_chains"][0]["filters"]
        filters = {each["name"]: each["typed_config"] for each in manager["typed_config"]["http_filters"]}
        limit = filters["envoy.filters.http.local_ratelimit"]
        limit["token_bucket"] = {"max_tokens": 3, "tokens_per_fill": 3, "fill_interval": "60s"}

    async with edge(tmp_path, three_a_minute) as envoy, open_channel(envoy.address) as channel:
        stub = InferenceServiceStub(channel)
        for _ in range(3):
            await stub.ListModels(model_pb2.ListModelsRequest(), timeout=60)
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.ListModels(model_pb2.ListModelsRequest(), timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
