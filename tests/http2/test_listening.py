"""A server's listening, and the interruption of its start and of its end."""

import asyncio
import socket

import pytest
from grpc import aio
from support.cluster.processes import free_port
from support.http2.server import SERVICE, Seen, echoing, handlers, path

from baton_http2.limits import Http2Limits, ServerLimits
from baton_http2.server.server import Http2Server
from baton_http2.sockets.accepting import open_sockets
from rpc.health import Health
from rpc.server import ServerOptions, serve

HTTP2 = ServerOptions(kind="http2")


def server() -> Http2Server:
    made = Http2Server([], ServerLimits(Http2Limits()))
    made.add_registered_method_handlers(SERVICE, handlers(Seen()))
    return made


async def asked(address: str) -> bytes:
    async with aio.insecure_channel(address) as channel:
        return await channel.unary_unary(path("unary"))(b"hello", timeout=60)


async def test_two_servers_share_a_port_if_both_say_so() -> None:
    first, second = server(), server()
    port = first.bind("127.0.0.1:0", None, shares_port=True)
    assert second.bind(f"127.0.0.1:{port}", None, shares_port=True) == port
    await first.start()
    await second.start()
    await first.stop(None)
    assert await asked(f"127.0.0.1:{port}") == b"hello"
    await second.stop(None)


async def test_a_port_that_is_taken_is_an_error() -> None:
    async with echoing() as running:
        with pytest.raises(OSError, match="in use"):
            server().bind(running.address, None)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["[::]", "localhost"])
async def test_both_families_are_served_at_one_port(host: str) -> None:
    listening = server()
    port = listening.bind(f"{host}:0", None)
    await listening.start()
    addresses = {address[4][0] for address in socket.getaddrinfo(host.strip("[]"), port)} | {"127.0.0.1"}
    for address in addresses:
        assert await asked(f"[{address}]:{port}" if ":" in address else f"{address}:{port}") == b"hello"
    await listening.stop(None)


@pytest.mark.parametrize("turns", range(6))
async def test_a_server_that_is_cancelled_while_it_starts_leaves_its_port_free(turns: int) -> None:
    address = f"127.0.0.1:{free_port()}"
    starting = asyncio.ensure_future(serve(address, [], health=Health(), options=HTTP2).__aenter__())
    await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    if starting.cancelled() or starting.exception():
        async with serve(address, [], health=Health(), options=HTTP2):
            pass


@pytest.mark.parametrize("turns", range(6))
async def test_a_server_that_is_cancelled_while_it_stops_leaves_its_port_free(turns: int) -> None:
    serving = serve("127.0.0.1:0", [], health=Health(), options=HTTP2)
    running = await serving.__aenter__()
    stopping = asyncio.ensure_future(serving.__aexit__(None, None, None))
    await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait([stopping])
    async with serve(running.address, [], health=Health(), options=HTTP2):
        pass


async def test_small_writes_do_not_wait_for_acknowledgements() -> None:
    [listening] = open_sockets("127.0.0.1", 0)
    delays: asyncio.Queue[bool] = asyncio.Queue()

    def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken = writer.get_extra_info("socket")
        delays.put_nowait(not taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    address = listening.getsockname()
    async with await asyncio.start_server(accepted, sock=listening):
        _, writer = await asyncio.open_connection(*address)
        assert await delays.get() is False
        writer.close()
