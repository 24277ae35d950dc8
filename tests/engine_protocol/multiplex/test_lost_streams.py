"""The calls of a shared stream that is lost, or that ends."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from support.eventually import eventually
from support.servers.scripted_router import scripted
from support.servers.shared_stream import Shared, Sharing, get_model, hang
from support.servers.tcp_proxy import TcpProxy

from baton.calls import unary
from baton.errors import BatonError, Unavailable
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import inference_service_pb2_grpc as inference
from baton.inference.v1 import model_pb2
from rpc.channels import open_channel
from runtime.aio import timeout


async def eventually_answers(stub: inference.InferenceServiceStub) -> None:
    """Calls until gRPC has connected again."""
    while True:
        try:
            await unary(stub.GetModel(model_pb2.GetModelRequest()))
        except Unavailable:
            await asyncio.sleep(0.05)
        else:
            return


async def test_a_lost_connection_is_unavailable_to_all_its_calls_and_the_next_one_opens_another(
    sharing: Sharing,
) -> None:
    async with (
        scripted(is_multiplexed=True, Generate=hang, GetModel=get_model) as peer,
        TcpProxy(peer.server.address) as proxy,
        timeout(20),
        open_channel(proxy.address) as channel,
        sharing.channel(channel, proxy.address) as calls,
    ):
        stub = inference.InferenceServiceStub(calls)
        waiting = [asyncio.create_task(Shared(peer, stub).read()) for _ in range(3)]
        await unary(stub.GetModel(model_pb2.GetModelRequest()))
        await proxy.cut()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in found] == [Unavailable] * 3
        await proxy.restore()
        await eventually_answers(stub)


async def test_a_connection_that_is_lost_while_requests_are_written_is_unavailable(sharing: Sharing) -> None:
    """Of a write that meets a lost connection gRPC says INTERNAL, which would end requests that others can serve."""
    async with scripted(is_multiplexed=True, GetModel=get_model, Generate=without_end) as peer:
        for _ in range(60):
            async with (
                TcpProxy(peer.server.address) as proxy,
                open_channel(proxy.address) as connection,
                sharing.channel(connection, proxy.address) as channel,
            ):
                stub = inference.InferenceServiceStub(channel)
                calls = [asyncio.create_task(ask_without_end(stub)) for _ in range(5)]
                calls += [asyncio.create_task(Shared(peer, stub).read()) for _ in range(3)]
                await asyncio.sleep(0.02)
                await proxy.cut()
                found = await asyncio.gather(*calls, return_exceptions=True)
                assert {type(error) for error in found} == {Unavailable}, found


async def without_end(request: pb.GenerateRequest, context: Any) -> None:
    while True:
        await context.write(pb.GenerateResponse())
        await asyncio.sleep(0)


async def ask_without_end(stub: inference.InferenceServiceStub) -> None:
    """One call after the other. Raises the error of the first that fails."""
    while True:
        await unary(stub.GetModel(model_pb2.GetModelRequest(), timeout=60))


async def test_a_server_that_ends_is_unavailable_to_the_calls_that_run(sharing: Sharing) -> None:
    async with AsyncExitStack() as stack, timeout(20):
        peer = await stack.enter_async_context(
            scripted(drain_seconds=0, is_multiplexed=True, Generate=hang, GetModel=get_model)
        )
        async with open_channel(peer.server.address) as channel, sharing.channel(channel, peer.server.address) as calls:
            stub = inference.InferenceServiceStub(calls)
            reading = asyncio.create_task(Shared(peer, stub).read())
            await unary(stub.GetModel(model_pb2.GetModelRequest()))
            await stack.aclose()
            with pytest.raises(Unavailable):
                await reading


async def test_an_unreachable_server_is_unavailable(sharing: Sharing) -> None:
    async with scripted() as peer:
        pass
    async with (
        open_channel(peer.server.address) as channel,
        sharing.channel(channel, peer.server.address) as calls,
        timeout(20),
    ):
        with pytest.raises(Unavailable):
            await unary(inference.InferenceServiceStub(calls).GetModel(model_pb2.GetModelRequest()))


async def test_no_code_of_a_call_runs_once_the_stream_has_ended(sharing: Sharing) -> None:
    running = 0

    async def wait(request: object, context: object) -> None:
        nonlocal running
        running += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            running -= 1

    async with scripted(is_multiplexed=True, Generate=wait) as peer, timeout(20):
        async with sharing.beside(peer) as channel:
            stub = inference.InferenceServiceStub(channel)
            reading = [asyncio.create_task(Shared(peer, stub).read()) for _ in range(8)]
            await eventually(lambda: running == 8)
        await eventually(lambda: running == 0)
        found = await asyncio.gather(*reading, return_exceptions=True)
    assert all(isinstance(each, BatonError) for each in found)
