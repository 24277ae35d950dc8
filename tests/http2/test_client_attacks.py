"""A hostile or broken worker against a router: each flood ends the connection soon, with a status."""

import asyncio
import time
from dataclasses import replace

import pytest
from grpc import StatusCode
from hpack import Encoder
from hyperframe.frame import DataFrame, SettingsFrame
from support.clients.scraping import since
from support.eventually import eventually
from support.http2.floods import FLOODS, HEAD, REQUEST, SETTINGS, flooded, headers
from support.http2.peer import message
from support.http2.pipe import Pipe

from baton_http2.client.connection import ClientConnection
from baton_http2.client.dialing import DEFAULT_LIMITS, ServerAddress, open_call
from baton_http2.limits import Http2Limits
from baton_http2.wire.frames import GOAWAY
from runtime.aio import timeout


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_ends_the_connection_and_its_call(name: str) -> None:
    _, code, pipe = await flooded(FLOODS[name]())
    assert code is (StatusCode.OK if "after the end" in name else StatusCode.UNAVAILABLE)
    assert len(pipe.written) < 2**20


async def test_the_reason_is_told_to_the_worker_and_counted() -> None:
    counted = since("baton_http2_budget_exceeded_total", budget="pings")
    _, _, pipe = await flooded(FLOODS["PING"]())
    assert counted.grown == 1
    goaway = pipe.written.rindex(bytes([GOAWAY, 0, 0, 0, 0, 0]))
    assert pipe.written[goaway + 10 + 3 : goaway + 10 + 4] == b"\x0b"
    assert b"too many pings" in pipe.written[goaway:]


async def test_announcements_before_an_answer_are_left_out() -> None:
    pipe, connection = Pipe(), ClientConnection(REQUEST, lambda _: None, DEFAULT_LIMITS)
    connection.connection_made(pipe)
    end = headers(Encoder().encode([("grpc-status", "0")]), "END_STREAM")
    connection.data_received(SETTINGS + headers(b"\x08\x03103") * 3 + headers(HEAD) + end)
    assert connection.call.status.result().code() is StatusCode.OK
    connection.connection_lost(None)


# Workers that say too little.


async def silenced(answer: bytes, limits: Http2Limits, **more: float) -> tuple[StatusCode, str]:
    """The end of a call that is answered so, and then by silence; a writer that waits must not wait for ever."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        while await reader.read(65_536):
            pass
        writer.close()
        gone.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    taken = replace(DEFAULT_LIMITS, http2=limits, **more)
    async with timeout(60), open_call(ServerAddress(address), "/test.Service/Method", lambda _: None, taken) as call:
        writing = [asyncio.create_task(call.write(bytes(200_000))) for _ in range(3)]
        status = await asyncio.shield(call.status)
        await asyncio.gather(*writing)
    async with timeout(60):
        await gone.wait()
    server.close()
    return status.code(), status.details()


@pytest.mark.parametrize("answer", [b"", SETTINGS[:5]], ids=["nothing", "half of SETTINGS"])
async def test_a_worker_that_says_nothing_is_left(answer: bytes) -> None:
    ended = await silenced(answer, Http2Limits(handshake_seconds=0.2))
    assert ended == (StatusCode.UNAVAILABLE, "the first frames did not come in time")


@pytest.mark.parametrize(
    "answer",
    [headers(HEAD)[:10], headers(HEAD) + DataFrame(1, message(b"abc")).serialize()[:12]],
    ids=["the head", "a message"],
)
async def test_a_worker_that_stops_within_a_frame_is_left(answer: bytes) -> None:
    ended = await silenced(SETTINGS + answer, Http2Limits(), keepalive_seconds=0.2, keepalive_timeout_seconds=0.2)
    assert ended == (StatusCode.UNAVAILABLE, "a PING was not answered")


async def test_a_worker_is_not_left_because_this_process_was_held_up() -> None:
    pipe = Pipe()
    limits = replace(DEFAULT_LIMITS, keepalive_seconds=0.05, keepalive_timeout_seconds=0.2)
    connection = ClientConnection(REQUEST, lambda _: None, limits)
    connection.connection_made(pipe)
    connection.data_received(SETTINGS)
    await eventually(lambda: b"keepaliv" in pipe.written)
    time.sleep(1.5)  # noqa: ASYNC251  # holds the loop up
    # The loop's timers have their turn before what the worker has sent is read.
    await asyncio.sleep(0.01)
    assert not pipe.is_closed
    # A worker that stays silent is left all the same.
    await eventually(lambda: pipe.is_closed)
    assert connection.call.status.result().details() == "a PING was not answered"
    connection.connection_lost(None)


async def test_a_worker_that_never_opens_a_window_is_left() -> None:
    closed = SettingsFrame(settings={4: 0}).serialize()
    code, _ = await silenced(closed + headers(HEAD), Http2Limits(slow_reader_seconds=0.4))
    assert code is StatusCode.UNAVAILABLE
