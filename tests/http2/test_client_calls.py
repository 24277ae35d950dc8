"""Our own client's calls to gRPC's servers, grpc.aio's and ours, in both event loops."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from grpc import StatusCode
from support.certificates import Authority
from support.clients.scraping import since
from support.eventually import eventually
from support.servers.tcp_proxy import TcpProxy

from baton.engine.v1 import multiplex_pb2 as pb
from baton.engine.v1 import multiplex_pb2_grpc
from baton_http2.client.call import ClientCall
from baton_http2.client.dialing import DEFAULT_LIMITS, ConnectFailed, ServerAddress, open_call
from rpc.auth.tls import TlsConfig
from rpc.health import Health
from rpc.server import Server, ServerKind, ServerOptions, Service, serve
from runtime.aio import timeout

NAME = "baton.engine.v1.MultiplexService"
PATH = f"/{NAME}/Multiplex"
Behaviour = Callable[[AsyncIterator[pb.MultiplexRequest], Any], Any]


@pytest.fixture(params=get_args(ServerKind))
def kind(request: pytest.FixtureRequest) -> ServerKind:
    found: ServerKind = request.param
    return found


@asynccontextmanager
async def serving(
    kind: ServerKind, behave: Behaviour, tls: TlsConfig | None = None, drain_seconds: float = 0.0
) -> AsyncGenerator[Server, None]:
    """A server whose only method does what the test says."""
    servicer = multiplex_pb2_grpc.MultiplexServiceServicer()
    servicer.Multiplex = behave  # type: ignore[method-assign, assignment]
    service = Service(NAME, multiplex_pb2_grpc.add_MultiplexServiceServicer_to_server, servicer)
    async with (
        timeout(60),
        serve(
            "127.0.0.1:0",
            [service],
            health=Health(),
            drain_seconds=drain_seconds,
            options=ServerOptions(tls=tls, kind=kind),
        ) as server,
    ):
        yield server


@dataclass(slots=True)
class Taken:
    """The messages that a call has received."""

    messages: list[bytes] = field(default_factory=list)

    def take(self, message: bytes) -> None:
        response = pb.MultiplexResponse.FromString(message)
        self.messages += [answer.message for answer in response.answers]


def said(content: bytes) -> bytes:
    """A request that carries some bytes."""
    return pb.MultiplexRequest(starts=[pb.CallStart(request=content)]).SerializeToString()


async def echo(requests: AsyncIterator[pb.MultiplexRequest], context: Any) -> None:
    """Sends each request back, until one is empty."""
    async for request in requests:
        for start in request.starts:
            if not start.request:
                return
            await context.write(pb.MultiplexResponse(answers=[pb.CallAnswer(message=start.request)]))


async def wait(requests: AsyncIterator[pb.MultiplexRequest], context: Any) -> None:
    await asyncio.Event().wait()


async def status_of(call: ClientCall) -> tuple[StatusCode, str]:
    status = await asyncio.shield(call.status)
    return status.code(), status.details()


async def test_messages_come_back_in_order_whatever_their_sizes(kind: ServerKind) -> None:
    contents = [b"%d" % number + b"x" * size for number, size in enumerate([0, 1, 16_384, 65_536, 3_000_000, 20] * 3)]
    taken = Taken()
    async with serving(kind, echo) as server, open_call(ServerAddress(server.address), PATH, taken.take) as call:
        for content in contents:
            await call.write(said(content))
        await call.write(said(b""))
        assert await status_of(call) == (StatusCode.OK, "")
    assert taken.messages == contents


async def test_what_is_written_in_one_turn_of_the_loop_arrives_whole(kind: ServerKind) -> None:
    contents = [b"%d" % number for number in range(2000)]
    taken = Taken()
    async with serving(kind, echo) as server, open_call(ServerAddress(server.address), PATH, taken.take) as call:
        await asyncio.gather(*(call.write(said(content)) for content in contents))
        await eventually(lambda: len(taken.messages) == len(contents))
    assert taken.messages == contents


async def test_a_status_comes_with_its_text_and_its_metadata(kind: ServerKind) -> None:
    async def refuse(requests: AsyncIterator[pb.MultiplexRequest], context: Any) -> None:
        await context.abort(StatusCode.DATA_LOSS, "lost: 100% of é", (("why", "asked"), ("why-bin", b"\x00\xff")))

    async with serving(kind, refuse) as server, open_call(ServerAddress(server.address), PATH, Taken().take) as call:
        status = await asyncio.shield(call.status)
    assert (status.code(), status.details()) == (StatusCode.DATA_LOSS, "lost: 100% of é")
    assert {("why", "asked"), ("why-bin", b"\x00\xff")} <= set(status.trailing_metadata())


async def test_a_status_follows_the_messages_that_were_sent_before_it(kind: ServerKind) -> None:
    async def answer_and_refuse(requests: AsyncIterator[pb.MultiplexRequest], context: Any) -> None:
        await context.write(pb.MultiplexResponse(answers=[pb.CallAnswer(message=b"first")]))
        await context.abort(StatusCode.ABORTED, "second")

    taken = Taken()
    async with (
        serving(kind, answer_and_refuse) as server,
        open_call(ServerAddress(server.address), PATH, taken.take) as call,
    ):
        assert await status_of(call) == (StatusCode.ABORTED, "second")
    assert taken.messages == [b"first"]


async def test_an_unknown_method_is_unimplemented(kind: ServerKind) -> None:
    async with (
        serving(kind, echo) as server,
        open_call(ServerAddress(server.address), "/no.Such/Method", Taken().take) as call,
    ):
        assert (await status_of(call))[0] is StatusCode.UNIMPLEMENTED


async def test_leaving_the_call_ends_it_on_the_server(kind: ServerKind) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def note(requests: AsyncIterator[pb.MultiplexRequest], context: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(kind, note) as server:
        async with open_call(ServerAddress(server.address), PATH, Taken().take) as call:
            await call.write(said(b"x"))
            await started.wait()
        assert (await status_of(call))[0] is StatusCode.CANCELLED
        await ended.wait()


async def test_a_writer_waits_for_a_server_that_does_not_read_and_goes_on_with_it(kind: ServerKind) -> None:
    may_read = asyncio.Event()
    seen: list[int] = []

    async def read_late(requests: AsyncIterator[pb.MultiplexRequest], context: Any) -> None:
        await may_read.wait()
        async for request in requests:
            seen.append(len(request.starts[0].request))

    written = 0
    async with serving(kind, read_late) as server, open_call(ServerAddress(server.address), PATH, Taken().take) as call:

        async def write_all() -> None:
            nonlocal written
            for _ in range(32):
                await call.write(said(bytes(1_000_000)))
                written += 1

        writing = asyncio.create_task(write_all())
        before = -1
        while written != before:
            before = written
            await asyncio.sleep(0.3)
        assert written < 32
        may_read.set()
        await writing
        await eventually(lambda: len(seen) == 32)
    assert seen == [1_000_000] * 32


async def test_a_server_that_drains_lets_the_call_go_on(kind: ServerKind) -> None:
    silent = since("baton_http2_budget_exceeded_total", budget="keepalive")
    started: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
    leaving = asyncio.Event()

    async def run() -> None:
        async with serving(kind, echo, drain_seconds=30) as server:
            started.set_result(server)
            await leaving.wait()

    serves = asyncio.create_task(run())
    address = (await started).address
    taken = Taken()
    async with open_call(ServerAddress(address), PATH, taken.take) as call:
        await call.write(said(b"before"))
        await eventually(lambda: taken.messages == [b"before"])
        leaving.set()
        await refuses(address)
        await call.write(said(b"while it drains"))
        await eventually(lambda: taken.messages == [b"before", b"while it drains"])
        await call.write(said(b""))
        assert await status_of(call) == (StatusCode.OK, "")
    await serves
    # One that was accepted as the server stopped is no connection that nobody closes.
    assert silent.grown == 0


async def refuses(address: str) -> None:
    """Returns once nothing listens there."""
    while True:
        try:
            async with open_call(ServerAddress(address), PATH, Taken().take):
                await asyncio.sleep(0.02)
        except ConnectFailed:
            return


async def test_a_lost_connection_ends_the_call(kind: ServerKind) -> None:
    async with (
        serving(kind, wait) as server,
        TcpProxy(server.address) as proxy,
        open_call(ServerAddress(proxy.address), PATH, Taken().take) as call,
    ):
        await eventually(lambda: proxy.accepted == 1)
        await proxy.cut()
        assert (await status_of(call))[0] is StatusCode.UNAVAILABLE
        # Nothing can be written any more, and no writer waits for ever.
        await call.write(said(bytes(1_000_000)))


async def test_a_server_that_does_not_answer_pings_is_lost(kind: ServerKind) -> None:
    limits = replace(DEFAULT_LIMITS, keepalive_seconds=0.2, keepalive_timeout_seconds=0.2)
    taken = Taken()
    async with (
        serving(kind, echo) as server,
        TcpProxy(server.address) as proxy,
        open_call(ServerAddress(proxy.address), PATH, taken.take, limits) as call,
    ):
        await call.write(said(b"x"))
        await eventually(lambda: taken.messages == [b"x"])
        proxy.freeze()
        assert await status_of(call) == (StatusCode.UNAVAILABLE, "a PING was not answered")


async def test_a_writer_that_waits_is_released_by_the_end_of_the_connection(kind: ServerKind) -> None:
    async with (
        serving(kind, wait) as server,
        TcpProxy(server.address) as proxy,
        open_call(ServerAddress(proxy.address), PATH, Taken().take) as call,
    ):
        writers = [asyncio.create_task(call.write(said(bytes(4_000_000)))) for _ in range(8)]
        await eventually(lambda: any(writer.done() for writer in writers))
        await proxy.cut()
        await asyncio.gather(*writers)


async def test_nothing_that_listens_is_unavailable() -> None:
    async with serving("http2", echo) as server:
        pass
    with pytest.raises(ConnectFailed, match=server.address):
        async with open_call(ServerAddress(server.address), PATH, Taken().take):
            pass


@pytest.mark.parametrize("address", ["nowhere", "unix:/run/worker", "host:99999", f"{'a' * 300}:1", "a..b:1"])
async def test_an_address_that_is_none_is_unavailable(address: str) -> None:
    with pytest.raises(ConnectFailed):
        async with open_call(ServerAddress(address), PATH, Taken().take):
            pass


# TLS.


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def own(authority: Authority, name: str, *hosts: str, ca: Path | None = None) -> TlsConfig:
    """Presents a certificate of `authority`, and verifies peers against `ca`."""
    pair = authority.issue(name, *hosts)
    return TlsConfig(ca=ca, cert=pair.cert, key=pair.key)


async def echoed(kind: ServerKind, server_tls: TlsConfig | None, tls: TlsConfig, server_name: str = "") -> list[bytes]:
    """The reply to a message through TLS. Raises ConnectFailed."""
    taken = Taken()
    async with (
        serving(kind, echo, server_tls) as server,
        open_call(ServerAddress(server.address, tls.client_context(), server_name), PATH, taken.take) as call,
    ):
        await call.write(said(b"x" * 100_000))
        await call.write(said(b""))
        code, details = await status_of(call)
        if code is not StatusCode.OK:
            raise ConnectFailed(details)
    return taken.messages


async def test_a_server_of_a_trusted_authority_is_called(kind: ServerKind, authority: Authority) -> None:
    assert await echoed(kind, own(authority, "server"), TlsConfig(ca=authority.ca)) == [b"x" * 100_000]


async def test_mutual_tls_takes_a_caller_with_a_certificate_and_no_other(
    kind: ServerKind, authority: Authority
) -> None:
    server = own(authority, "server", ca=authority.ca)
    assert await echoed(kind, server, own(authority, "caller", ca=authority.ca)) == [b"x" * 100_000]
    with pytest.raises(ConnectFailed):
        await echoed(kind, server, TlsConfig(ca=authority.ca))


async def test_a_server_of_another_authority_is_unavailable(
    kind: ServerKind, authority: Authority, tmp_path: Path
) -> None:
    with pytest.raises(ConnectFailed):
        await echoed(kind, own(authority, "server"), TlsConfig(ca=Authority(tmp_path, "other").ca))


async def test_the_name_in_the_certificate_is_checked(kind: ServerKind, authority: Authority) -> None:
    server, caller = own(authority, "server", "worker.example"), TlsConfig(ca=authority.ca)
    assert await echoed(kind, server, caller, "worker.example") == [b"x" * 100_000]
    with pytest.raises(ConnectFailed):
        await echoed(kind, server, caller, "other.example")


async def test_a_server_without_tls_is_unavailable(kind: ServerKind, authority: Authority) -> None:
    with pytest.raises(ConnectFailed):
        await echoed(kind, None, TlsConfig(ca=authority.ca))
