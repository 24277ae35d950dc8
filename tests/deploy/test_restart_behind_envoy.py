"""Requests through Envoy, without a client's own retry, while its routers are restarted."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from support.cluster.fleet import Fleet, FleetPlan, fleet
from support.eventually import eventually
from support.faults.load import requests_of
from support.servers.envoy import Envoy, running_envoy
from support.servers.etcd import EtcdServer
from support.servers.scripted_router import NAME, scripted

from baton.inference.v1 import model_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from rpc.channels import open_channel

STREAMS = 100
CONNECTIONS = 4
# 100 streams of five tokens a second: what a small machine routes with room to spare.
ENGINE = (
    "engine={kind: simulated, name: demo, num_blocks: 8192, block_bytes: 64, decode_step_seconds: 0.2, max_batch: 256}"
)
ROUTER = ("announce_seconds=2", "drain_seconds=30", "probe={interval_seconds: 0.5, timeout_seconds: 5}")


async def restart(running: Fleet, envoy: Envoy, name: str) -> int:
    """Its exit code. Returns when Envoy sends requests to the new process."""
    node = running.nodes[name]
    exit_code = await node.terminate()
    node.start()
    await node.serving()
    while await envoy.healthy_routers() < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return exit_code


@pytest.mark.timeout(150)
async def test_routers_restart_behind_envoy_and_no_stream_fails(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    plan = FleetPlan(
        "behind-envoy", shared_etcd.endpoint, (ENGINE, "drain_seconds=1"), ROUTER, prefill=1, decode=1, routers=2
    )
    async with fleet(plan, tmp_path) as running, AsyncExitStack() as stack:
        addresses = [node.direct for node in running.nodes.values() if node.role == "router"]
        envoy = await stack.enter_async_context(running_envoy(tmp_path, addresses))
        channels = [await stack.enter_async_context(open_channel(envoy.address)) for _ in range(CONNECTIONS)]
        stubs = [InferenceServiceStub(channel) for channel in channels]
        async with requests_of(stubs, at_once=STREAMS, max_tokens=20, attempts=1) as loading:
            await eventually(lambda: loading.right > STREAMS)
            exit_codes = [await restart(running, envoy, name) for name in ("router-0", "router-1")]
            before = loading.right
            await eventually(lambda: loading.right > before + STREAMS)
        print(f"\n{loading.right} streams right, {len(loading.wrong)} wrong, over two restarts of routers")
        assert loading.wrong == []
        assert loading.right > STREAMS
        assert exit_codes == [0, 0]
        assert await running.blocks_used() == 0


@pytest.mark.parametrize(
    ("message", "is_retried"), [("CANCELLED", True), ("cancelled by CancelGeneration", False)], ids=["grpcs", "ours"]
)
async def test_a_call_that_met_a_stopping_router_goes_to_another(
    tmp_path: Path, message: str, is_retried: bool
) -> None:
    """gRPC itself answers a call that reaches a server as it stops. A request that was cancelled stays so."""

    async def refuse(_request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.CANCELLED, message)

    async def answer(_request: Any, _context: Any) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse()

    async with scripted(ListModels=refuse) as stopping, scripted(ListModels=answer) as running:
        for each in (stopping, running):
            each.health.set(NAME, True)
        addresses = [stopping.server.address, running.server.address]
        async with running_envoy(tmp_path, addresses) as envoy, open_channel(envoy.address) as channel:
            stub = InferenceServiceStub(channel)
            ends = {await _end_of(stub) for _ in range(30)}
    assert ends == ({"OK"} if is_retried else {"OK", f"CANCELLED: {message}"})


async def _end_of(stub: InferenceServiceStub) -> str:
    try:
        await stub.ListModels(model_pb2.ListModelsRequest(), timeout=60)
    except aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK"
