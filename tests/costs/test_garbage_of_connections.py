"""Our client's connections leave nothing behind that only a garbage collection frees, however they end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from support.servers.tcp_proxy import TcpProxy

from baton.engine.v1 import multiplex_pb2 as pb
from baton.engine.v1 import multiplex_pb2_grpc
from baton_http2.client.call import ClientCall
from baton_http2.client.dialing import ServerAddress, open_call
from benchmarks.leftovers import garbage
from rpc.health import Health
from rpc.server import Service, serve
from runtime.aio import timeout

NAME = "baton.engine.v1.MultiplexService"


class Waiting(multiplex_pb2_grpc.MultiplexServiceServicer):
    """Answers nothing."""

    async def Multiplex(self, requests: AsyncIterator[pb.MultiplexRequest], context: Any) -> None:  # type: ignore[override]
        async for _ in requests:
            pass


async def cut(proxy: TcpProxy, call: ClientCall) -> None:
    await proxy.cut()
    await asyncio.shield(call.status)
    await proxy.restore()


async def cancel(proxy: TcpProxy, call: ClientCall) -> None:
    call.cancel()


async def leave(proxy: TcpProxy, call: ClientCall) -> None:
    pass


@pytest.mark.parametrize("end", [cut, cancel, leave])
async def test_a_connection_that_has_ended_is_no_garbage(
    end: Callable[[TcpProxy, ClientCall], Awaitable[None]],
) -> None:
    service = Service(NAME, multiplex_pb2_grpc.add_MultiplexServiceServicer_to_server, Waiting())
    async with (
        timeout(60),
        serve("127.0.0.1:0", [service], health=Health(), drain_seconds=0) as server,
        TcpProxy(server.address) as proxy,
    ):
        garbage.watch()
        for _ in range(5):
            async with open_call(ServerAddress(proxy.address), f"/{NAME}/Multiplex", lambda _: None) as call:
                await call.write(pb.MultiplexRequest().SerializeToString())
                await end(proxy, call)
            del call
        _, cycles = garbage.found()
    assert [cycle for cycle in cycles if "baton_http2.client" in cycle or "ClientConnection" in cycle] == []
