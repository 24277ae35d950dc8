"""grpcio's own clients, synchronous and asynchronous, plain and over TLS, against our server."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio
from support.certificates import Authority
from support.eventually import eventually
from support.http2.server import Echoing, echoing, path

from rpc.auth.tls import TlsConfig
from runtime.aio import timeout

LARGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@asynccontextmanager
async def opened(**more: Any) -> AsyncIterator[tuple[Echoing, aio.Channel]]:
    async with echoing(**more) as server, aio.insecure_channel(server.address, options=LARGE) as channel:
        yield server, channel


async def failure(call: Any) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        await call if hasattr(call, "__await__") else [each async for each in call]
    return caught.value


# The four kinds of calls.


async def test_unary_calls() -> None:
    async with opened() as (_, channel):
        call = channel.unary_unary(path("unary"))
        assert await asyncio.gather(*(call(b"%d" % number) for number in range(300))) == [b"%d" % n for n in range(300)]


async def test_server_streams() -> None:
    async with opened() as (_, channel):
        answers = channel.unary_stream(path("count"))(b"5000")
        assert [int(each) async for each in answers] == list(range(5000))


async def test_client_streams() -> None:
    async with opened() as (_, channel):
        requests = iter([b"a", b"", b"c"])
        assert await channel.stream_unary(path("gather"))(requests) == b"a,,c"


async def test_streams_in_both_directions() -> None:
    async with opened() as (_, channel):
        call = channel.stream_stream(path("bidi"))()
        for number in range(100):
            await call.write(b"%d" % number)
            assert await call.read() == b"%d" % number
        await call.done_writing()
        assert await call.read() is aio.EOF


async def test_a_thousand_streams_of_one_connection() -> None:
    async with opened() as (_, channel):
        count = channel.unary_stream(path("count"))

        async def one() -> int:
            return len([each async for each in count(b"20")])

        assert set(await asyncio.gather(*(one() for _ in range(1000)))) == {20}


def test_the_synchronous_client() -> None:
    """In threads of its own, beside a server in a loop of its own."""

    def talk(address: str) -> list[Any]:
        with grpc.insecure_channel(address) as channel:
            return [
                channel.unary_unary(path("unary"))(b"hi"),
                [int(each) for each in channel.unary_stream(path("count"))(b"3")],
                channel.stream_unary(path("gather"))(iter([b"a", b"b"])),
                list(channel.stream_stream(path("bidi"))(iter([b"a", b"b"]))),
            ]

    async def run() -> list[Any]:
        async with echoing() as server:
            return await asyncio.to_thread(talk, server.address)

    assert asyncio.run(run()) == [b"hi", [0, 1, 2], b"a,b", [b"a", b"b"]]


# What travels beside messages.


async def test_metadata_there_and_back() -> None:
    async with opened() as (_, channel):
        sent = (("initial-a", "1"), ("trailing-b-bin", b"\0\xff" * 50), ("trailing-c", "x, y"), ("x-d-bin", b""))
        call = channel.unary_unary(path("metadata"))(b"", metadata=sent)
        assert await call == repr([("x-d-bin", b"")]).encode()
        assert dict(await call.initial_metadata())["initial-a"] == "1"
        assert dict(await call.trailing_metadata()) == {"trailing-b-bin": b"\0\xff" * 50, "trailing-c": "x, y"}


@pytest.mark.parametrize("sizes", [[17_000], [40_000], [1000] * 50], ids=["17 KB", "40 KB", "50 of 1 KB"])
async def test_metadata_over_the_limit_end_their_call_and_no_other(sizes: list[int]) -> None:
    async with opened() as (_, channel):
        running = channel.unary_stream(path("hang"))(b"x")
        assert await running.read() == b"x"
        metadata = [(f"x-{number}", "v" * size) for number, size in enumerate(sizes)]
        error = await failure(channel.unary_unary(path("unary"))(b"", metadata=metadata))
        assert (error.code(), error.details()) == (StatusCode.RESOURCE_EXHAUSTED, "metadata is too large")
        assert await channel.unary_unary(path("unary"))(b"next") == b"next"
        assert not running.done()
        running.cancel()


async def test_an_abort_arrives_with_its_text_and_metadata() -> None:
    async with opened() as (_, channel):
        error = await failure(channel.unary_unary(path("abort"))(b""))
    assert (error.code(), error.details()) == (StatusCode.DATA_LOSS, "lost: 100% of é")
    assert dict(error.trailing_metadata())["why-bin"] == b"\x00\xff"


async def test_deadlines() -> None:
    async with opened() as (server, channel):
        for seconds in (0.2, 2.0, 10.0):
            error = await failure(channel.unary_stream(path("hang"))(b"x", timeout=seconds))
            assert error.code() is StatusCode.DEADLINE_EXCEEDED
            if server.seen.started:  # else the deadline passed before the call arrived
                break
        await eventually(lambda: server.seen.cancelled == 1)


async def test_cancelling() -> None:
    async with opened() as (server, channel):
        call = channel.unary_stream(path("hang"))(b"x")
        assert await call.read() == b"x"
        call.cancel()
        await eventually(lambda: server.seen.cancelled == 1)
        assert server.seen.contexts[0].cancelled()


async def test_an_unknown_method() -> None:
    async with opened() as (_, channel):
        assert (await failure(channel.unary_unary("/a.B/C")(b""))).code() is StatusCode.UNIMPLEMENTED


# Sizes.


@pytest.mark.parametrize("size", [0, 1, 16_378, 16_379, 16_380, 65_530, 65_531, 3_000_000])
async def test_messages_of_every_size(size: int) -> None:
    async with opened() as (_, channel):
        content = bytes(range(256)) * (size // 256) + bytes(size % 256)
        assert await channel.unary_unary(path("unary"))(content) == content


async def test_large_messages_both_ways_at_once() -> None:
    async with opened(max_message_bytes=40_000_000) as (_, channel):
        contents = [bytes([number]) * 20_000_000 for number in range(4)]
        call = channel.unary_unary(path("unary"))
        async with timeout(60):
            assert await asyncio.gather(*(call(content) for content in contents)) == contents


async def test_a_message_over_the_limit() -> None:
    async with opened(max_message_bytes=1_000_000) as (_, channel):
        call = channel.unary_unary(path("unary"))
        error = await failure(call(bytes(20_000_000)))
        assert (error.code(), "larger than max" in error.details()) == (StatusCode.RESOURCE_EXHAUSTED, True)
        assert await call(b"next") == b"next"


async def test_a_slow_reader_gets_everything_in_order() -> None:
    async with opened() as (_, channel):
        call = channel.unary_stream(path("count"))(b"20000")
        found = []
        while (message := await call.read()) is not aio.EOF:
            if len(found) in (10, 5000):
                await asyncio.sleep(0.2)
            found.append(int(message))
    assert found == list(range(20_000))


async def test_a_reader_that_reads_nothing_holds_up_no_other_call() -> None:
    async with opened() as (_, channel):
        stuck = channel.unary_stream(path("endless"))(bytes(1000))
        await stuck.read()
        for _ in range(50):
            assert await channel.unary_unary(path("unary"))(b"x") == b"x"
        stuck.cancel()


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests_and_answers(compression: grpc.Compression) -> None:
    async with opened() as (_, channel):
        content = b"again and " * 100_000
        assert await channel.unary_unary(path("unary"))(content, compression=compression) == content
        assert await channel.unary_unary(path("compressed"))(content) == content


# Connections.


async def test_a_server_that_stops_lets_a_stream_end_and_then_refuses_calls() -> None:
    async with echoing(grace_seconds=10) as server:
        channel = aio.insecure_channel(server.address)
        call = channel.stream_stream(path("bidi"))()
        await call.write(b"before")
        assert await call.read() == b"before"
        stopping = asyncio.create_task(server.server.stop(10))
        await asyncio.sleep(0.2)
        await call.write(b"after")
        assert await call.read() == b"after"
        assert not stopping.done()
        assert (await failure(channel.unary_unary(path("unary"))(b""))).code() is StatusCode.UNAVAILABLE
        await call.done_writing()
        assert await call.read() is aio.EOF
        await stopping
        await channel.close()


async def test_what_still_runs_when_a_server_stops_is_unavailable() -> None:
    async with opened() as (server, channel):
        call = channel.unary_stream(path("hang"))(b"x")
        await call.read()
        await server.server.stop(0.1)
        assert await call.code() is StatusCode.UNAVAILABLE
        assert server.seen.cancelled == 1


async def test_an_old_connection_is_renewed_while_streams_run() -> None:
    async with opened(max_age_seconds=0.3) as (server, channel):
        ticks, most_connections = channel.unary_stream(path("ticks"))(b""), 1
        for _ in range(60):
            await ticks.read()
            assert await channel.unary_unary(path("unary"))(b"x") == b"x"
            # Connections without a stream end with their age.
            most_connections = max(most_connections, len(server.server.connections.open))
        assert most_connections > 1
        ticks.cancel()


async def test_a_client_that_pings_too_often_is_told_so_and_connects_again() -> None:
    options = [
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with echoing() as server, aio.insecure_channel(server.address, options=options) as channel:
        error = await failure(channel.unary_stream(path("hang"))(b"", timeout=20))
        assert (error.code(), "too_many_pings" in error.details()) == (StatusCode.UNAVAILABLE, True)


# TLS.


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def server_tls(authority: Authority, ca: Path | None = None) -> TlsConfig:
    pair = authority.issue("server")
    return TlsConfig(ca=ca, cert=pair.cert, key=pair.key)


async def test_calls_over_tls(authority: Authority) -> None:
    credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    async with (
        echoing(tls=server_tls(authority)) as server,
        aio.secure_channel(server.address, credentials) as channel,
    ):
        assert await channel.unary_unary(path("unary"))(bytes(2_000_000)) == bytes(2_000_000)
        assert len([each async for each in channel.unary_stream(path("count"))(b"3000")]) == 3000


async def test_mutual_tls_says_who_calls(authority: Authority) -> None:
    pair = authority.issue("caller", "caller.test", uris=["baton://client/carol"])
    credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes(), pair.key.read_bytes(), pair.cert.read_bytes())
    async with (
        echoing(tls=server_tls(authority, authority.ca)) as server,
        aio.secure_channel(server.address, credentials) as channel,
    ):
        answer = (await channel.unary_unary(path("identity"))(b"")).decode()
    assert "b'baton://client/carol'" in answer
    assert "b'caller.test'" in answer


def test_a_peer_that_offers_no_alpn_is_not_served(authority: Authority) -> None:
    context = ssl.create_default_context(cafile=str(authority.ca))

    def talk(port: int) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", port), 5) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            return b"".join(iter(lambda: secure.recv(1000), b""))

    async def run() -> bytes:
        async with echoing(tls=server_tls(authority)) as server:
            return await asyncio.to_thread(talk, server.port)

    assert b"ALPN" in asyncio.run(run())
