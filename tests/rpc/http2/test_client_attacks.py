"""What a hostile or broken worker does to a router: each flood ends the connection soon, for little, with a status."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import repeat

import pytest
from grpc import StatusCode
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from support.calibration import here
from support.clients.scraping import since
from support.eventually import eventually
from support.http2.peer import message
from support.http2.pipe import Pipe

from rpc.http2.client.connection import ClientConnection
from rpc.http2.client.dialing import DEFAULT_LIMITS, Peer, open_call
from rpc.http2.limits import Http2Limits
from rpc.http2.wire.frames import GOAWAY
from runtime.aio import timeout

CPU_SECONDS = 0.05
# So many frames come in one read, and so many reads are tried before the flood counts as endless.
BATCH, READS = 100, 2000
REQUEST = Peer("127.0.0.1:1").head("/test.Service/Method")
SETTINGS = SettingsFrame().serialize()
HEAD = b"\x88\x00\x0ccontent-type\x10application/grpc"

Reads = Iterable[bytes]


def headers(block: bytes, *flags: str, stream_id: int = 1) -> bytes:
    return HeadersFrame(stream_id, block, flags=["END_HEADERS", *flags]).serialize()


def flood(frame: bytes, first: bytes = b"") -> Reads:
    return (first + frame * BATCH, *repeat(frame * BATCH, READS))


def after_the_head(frame: bytes) -> Reads:
    return flood(frame, headers(HEAD))


def after_the_end(frame: bytes) -> Reads:
    return flood(frame, headers(HEAD) + headers(b"\x00\x0bgrpc-status\x010", "END_STREAM"))


def hpack_bomb() -> Iterator[bytes]:
    entry = b"\x40\x01x\x7f" + bytes([0xBD, 0x1E - 1]) + b"v" * (0x7F + 0x3D + (0x1D << 7))
    yield headers(HEAD + entry + b"\xbe" * 12_000)


def long_lists() -> Iterator[bytes]:
    """Header lists over the limit, whose tables still have to be kept in step."""
    while True:
        yield headers(b"\x88\0\x01a\xff\x83\x7d" + b"\x18\xc6\x31\x8c\x63" * 3226)


FLOODS: dict[str, Callable[[], Reads]] = {
    "PING": lambda: flood(PingFrame(opaque_data=b"12345678").serialize()),
    "answers to PING": lambda: flood(PingFrame(opaque_data=b"12345678", flags=["ACK"]).serialize()),
    "SETTINGS": lambda: flood(SettingsFrame(settings={4: 65_535}).serialize()),
    "windows that close and open": lambda: flood(
        SettingsFrame(settings={4: 0}).serialize() + SettingsFrame(settings={4: 2**20}).serialize()
    ),
    "acknowledged SETTINGS": lambda: flood(SettingsFrame(flags=["ACK"]).serialize()),
    "WINDOW_UPDATE of the connection": lambda: flood(WindowUpdateFrame(0, window_increment=1).serialize()),
    "WINDOW_UPDATE of the stream": lambda: flood(WindowUpdateFrame(1, window_increment=1).serialize()),
    "PRIORITY": lambda: flood(PriorityFrame(1, depends_on=0).serialize()),
    "unknown frames": lambda: flood(b"\0\0\0\x77\0\0\0\0\0"),
    "GOAWAY": lambda: flood(GoAwayFrame(0, last_stream_id=1).serialize()),
    "empty DATA": lambda: after_the_head(DataFrame(1).serialize()),
    "padded DATA": lambda: after_the_head(DataFrame(1, flags=["PADDED"], pad_length=0).serialize()),
    "DATA before the head": lambda: flood(DataFrame(1).serialize()),
    "DATA after the end": lambda: after_the_end(DataFrame(1, b"x").serialize()),
    "HEADERS after the head": lambda: after_the_head(headers(HEAD)),
    "HEADERS after the end": lambda: after_the_end(headers(HEAD, "END_STREAM")),
    "announcements": lambda: flood(headers(b"\x08\x03103")),
    "RST_STREAM": lambda: flood(RstStreamFrame(1, error_code=2).serialize()),
    "CONTINUATION": lambda: flood(ContinuationFrame(1, HEAD * 20).serialize(), HeadersFrame(1, HEAD).serialize()),
    "empty CONTINUATION": lambda: flood(ContinuationFrame(1).serialize(), HeadersFrame(1, HEAD).serialize()),
    "HPACK bomb": hpack_bomb,
    "long header lists": long_lists,
    "streams that were not opened": lambda: (headers(HEAD, stream_id=each) for each in range(3, 10**6, 2)),
}


async def flooded(reads: Reads) -> tuple[float, StatusCode, Pipe]:
    """What the flood costs until the connection is closed, and how the call has ended then."""
    pipe, connection = Pipe(), ClientConnection(REQUEST, lambda _: None, DEFAULT_LIMITS)
    connection.connection_made(pipe)
    connection.data_received(SETTINGS)
    began = time.process_time()
    for read in reads:
        connection.data_received(read)
        await asyncio.sleep(0)
        if pipe.is_closed:
            break
    spent = time.process_time() - began
    assert pipe.is_closed, "the flood has not ended the connection"
    status = connection.call.status.result()
    connection.connection_lost(None)
    return spent, status.code(), pipe


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_is_ended_for_little(name: str) -> None:
    # Other work on this machine only ever adds to the CPU time: one try within the bound shows that it is kept.
    for _ in range(10):
        spent, code, pipe = await flooded(FLOODS[name]())
        assert code is (StatusCode.OK if "after the end" in name else StatusCode.UNAVAILABLE)
        assert len(pipe.written) < 2**20
        if spent < (most := here(CPU_SECONDS)):
            return
    pytest.fail(f"{spent:.3f} s of CPU, and no try of ten below {most:.3f}")


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
    """How a call ends that is answered so, and then by silence; a writer that waits must not wait for ever."""
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
    async with timeout(60), open_call(Peer(address), "/test.Service/Method", lambda _: None, taken) as call:
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
