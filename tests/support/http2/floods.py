"""Floods of a hostile or broken worker into a router's connection."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat

from grpc import StatusCode
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
from support.http2.pipe import Pipe

from baton_http2.client.connection import ClientConnection
from baton_http2.client.dialing import DEFAULT_LIMITS, ServerAddress

# So many frames come in one read, and so many reads are tried before the flood counts as endless.
BATCH, READS = 100, 2000
REQUEST = ServerAddress("127.0.0.1:1").head("/test.Service/Method")
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
    """The cost of the flood until the connection is closed, and the end of the call then."""
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
