"""Our own client before servers that break the protocol, frame by frame: how its call ends, and that it leaves."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from grpc import StatusCode
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
)
from support.http2.peer import PREFACE, Peer, message, opened

from baton_http2.client.call import Status
from baton_http2.client.dialing import DEFAULT_LIMITS, ServerAddress, open_call
from baton_http2.limits import Http2Limits, Rate
from runtime.aio import timeout

PATH = "/test.Service/Method"
_LIMITS = replace(
    DEFAULT_LIMITS,
    http2=Http2Limits(pings=Rate(burst=50, per_second=0), empty_frames=Rate(burst=50, per_second=0)),
    max_message_bytes=1000,
)

Frames = Sequence["Frame | bytes"]


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a call, the messages before that, and the frames that the server got."""

    status: Status
    messages: list[bytes]
    frames: list[Frame]

    @property
    def code(self) -> StatusCode:
        return self.status.code()


@asynccontextmanager
async def answering(
    script: Callable[[Peer], Frames], *, closes: bool = False
) -> AsyncGenerator[tuple[str, list[Peer]], None]:
    """A server that answers every connection with the same frames, and then reads until the client has gone."""
    peers: list[Peer] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        assert await reader.readexactly(len(PREFACE)) == PREFACE
        await peer.until(lambda: any(isinstance(frame, HeadersFrame) for frame in peer.frames))
        await peer.send(*script(peer))
        if not closes:
            await peer.closed()
        writer.close()
        peers.append(peer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", peers
    finally:
        server.close()


async def call(script: Callable[[Peer], Frames], *, closes: bool = False) -> Ended:
    """The end of a call that is answered so."""
    messages: list[bytes] = []
    async with timeout(60), answering(script, closes=closes) as (address, peers):
        async with open_call(ServerAddress(address), PATH, messages.append, _LIMITS) as made:
            status = await asyncio.shield(made.status)
        while not peers:  # noqa: ASYNC110  # the server's end of the connection
            await asyncio.sleep(0.01)
    return Ended(status, messages, peers[0].frames)


def head(peer: Peer, *fields: tuple[str, str], status: str = "200", ends: bool = False, stream_id: int = 1) -> Frame:
    """The answer's first header block."""
    block = peer.block([(":status", status), ("content-type", "application/grpc"), *fields])
    return HeadersFrame(stream_id, block, flags=["END_HEADERS", *(["END_STREAM"] if ends else [])])


def trailers(peer: Peer, *fields: tuple[str, str]) -> Frame:
    return HeadersFrame(1, peer.block(fields), flags=["END_HEADERS", "END_STREAM"])


OK = ("grpc-status", "0")
SETTINGS = SettingsFrame()

# What the server sends, and the code and a part of the text with which the call ends.
BREACHES: dict[str, tuple[Callable[[Peer], Frames], StatusCode, str]] = {
    "another protocol": (lambda _: [b"HTTP/1.1 400 Bad Request\r\n\r\n"], StatusCode.UNAVAILABLE, "too large"),
    "no SETTINGS first": (lambda peer: [head(peer)], StatusCode.UNAVAILABLE, "not SETTINGS"),
    "a proxy's answer": (
        lambda peer: [SETTINGS, head(peer, status="503", ends=True)],
        StatusCode.UNAVAILABLE,
        "HTTP status 503",
    ),
    "a refusal by HTTP": (lambda peer: [SETTINGS, head(peer, status="401")], StatusCode.UNAUTHENTICATED, "401"),
    "trailers without a status": (
        lambda peer: [SETTINGS, head(peer), trailers(peer, ("x", "y"))],
        StatusCode.UNKNOWN,
        "no status",
    ),
    "a status that is no number": (
        lambda peer: [SETTINGS, head(peer), trailers(peer, ("grpc-status", "fine"))],
        StatusCode.UNKNOWN,
        "no status",
    ),
    "an unknown status": (
        lambda peer: [SETTINGS, head(peer), trailers(peer, ("grpc-status", "99"))],
        StatusCode.UNKNOWN,
        "",
    ),
    "an end without trailers": (
        lambda peer: [SETTINGS, head(peer), DataFrame(1, b"", flags=["END_STREAM"])],
        StatusCode.INTERNAL,
        "without a status",
    ),
    "an end within a message": (
        lambda peer: [SETTINGS, head(peer), DataFrame(1, message(b"abc")[:6]), trailers(peer, OK)],
        StatusCode.INTERNAL,
        "within a message",
    ),
    "a failure within a message": (
        lambda peer: [
            SETTINGS,
            head(peer),
            DataFrame(1, message(b"abc")[:6]),
            trailers(peer, ("grpc-status", "4"), ("grpc-message", "too late")),
        ],
        StatusCode.DEADLINE_EXCEEDED,
        "too late",
    ),
    "a compressed message": (
        lambda peer: [SETTINGS, head(peer), DataFrame(1, message(b"abc", compressed=1))],
        StatusCode.INTERNAL,
        "compressed",
    ),
    "less than its content-length": (
        lambda peer: [SETTINGS, head(peer, ("content-length", "9")), DataFrame(1, message(b"abc")), trailers(peer, OK)],
        StatusCode.UNAVAILABLE,
        "has ended the stream",
    ),
    "more than its content-length": (
        lambda peer: [SETTINGS, head(peer, ("content-length", "7")), DataFrame(1, message(b"abc")), trailers(peer, OK)],
        StatusCode.UNAVAILABLE,
        "has ended the stream",
    ),
    "a content-length that is no number": (
        lambda peer: [SETTINGS, head(peer, ("content-length", "+8")), DataFrame(1, message(b"abc"))],
        StatusCode.UNAVAILABLE,
        "has ended the stream",
    ),
    "two content-lengths": (
        lambda peer: [SETTINGS, head(peer, *[("content-length", "8")] * 2), DataFrame(1, message(b"abc"))],
        StatusCode.UNAVAILABLE,
        "has ended the stream",
    ),
    "a message over the limit": (
        lambda peer: [SETTINGS, head(peer), DataFrame(1, message(bytes(1001)))],
        StatusCode.RESOURCE_EXHAUSTED,
        "larger than max",
    ),
    "a reset": (
        lambda _: [SETTINGS, RstStreamFrame(1, error_code=7)],
        StatusCode.UNAVAILABLE,
        "has ended the stream",
    ),
    "goodbye, without an answer": (
        lambda _: [SETTINGS, GoAwayFrame(0, last_stream_id=0)],
        StatusCode.UNAVAILABLE,
        "goes away",
    ),
    "a pushed stream": (
        lambda peer: [SETTINGS, PushPromiseFrame(1, 2, peer.block([(":status", "200")]), flags=["END_HEADERS"])],
        StatusCode.UNAVAILABLE,
        "pushed",
    ),
    "an answer to nothing": (lambda peer: [SETTINGS, head(peer, stream_id=3)], StatusCode.UNAVAILABLE, "stream 3"),
    "DATA on no known stream": (lambda _: [SETTINGS, DataFrame(5, b"x")], StatusCode.UNAVAILABLE, "idle"),
    "a header block that is none": (
        lambda _: [SETTINGS, HeadersFrame(1, b"\xff\xff\xff\xff\xff\xff", flags=["END_HEADERS"])],
        StatusCode.UNAVAILABLE,
        "",
    ),
    "metadata without end": (
        lambda peer: [SETTINGS, head(peer, *((f"x-{number}", "y" * 100) for number in range(130)))],
        StatusCode.UNAVAILABLE,
        "",
    ),
    "a window that is too wide": (lambda _: [SETTINGS, opened(1, 2**31 - 1)], StatusCode.UNAVAILABLE, ""),
    "pings without end": (lambda _: [SETTINGS, *([PingFrame()] * 60)], StatusCode.UNAVAILABLE, "pings"),
    "frames that carry nothing": (
        lambda peer: [SETTINGS, head(peer), *([DataFrame(1, b"")] * 60)],
        StatusCode.UNAVAILABLE,
        "empty_frames",
    ),
    "a dependency on itself": (
        lambda _: [SETTINGS, PriorityFrame(1, depends_on=1)],
        StatusCode.UNAVAILABLE,
        "",
    ),
}


@pytest.mark.parametrize("name", BREACHES)
async def test_a_breach_ends_the_call_and_the_connection(name: str) -> None:
    script, code, text = BREACHES[name]
    ended = await call(script)
    assert ended.code is code
    assert text in ended.status.details()
    assert ended.messages == ([b"abc"] if name == "less than its content-length" else [])


async def test_the_end_of_the_connection_ends_the_call() -> None:
    ended = await call(lambda peer: [SETTINGS, head(peer), DataFrame(1, message(b"abc"))], closes=True)
    assert ended.code is StatusCode.UNAVAILABLE
    assert ended.messages == [b"abc"]


async def test_a_call_goes_on_after_a_goodbye_that_counts_it() -> None:
    ended = await call(
        lambda peer: [
            SETTINGS,
            GoAwayFrame(0, last_stream_id=1),
            head(peer),
            DataFrame(1, message(b"abc")),
            trailers(peer, OK),
        ]
    )
    assert (ended.code, ended.messages) == (StatusCode.OK, [b"abc"])


async def test_an_answer_of_trailers_alone_is_a_status() -> None:
    ended = await call(
        lambda peer: [SETTINGS, head(peer, ("grpc-status", "8"), ("grpc-message", "100%25 full"), ends=True)]
    )
    assert (ended.code, ended.status.details()) == (StatusCode.RESOURCE_EXHAUSTED, "100% full")


async def test_metadata_that_are_no_base64_leave_the_status() -> None:
    ended = await call(
        lambda peer: [SETTINGS, head(peer), trailers(peer, ("grpc-status", "5"), ("x-bin", "?"), ("y", "z"))]
    )
    assert (ended.code, ended.status.trailing_metadata()) == (StatusCode.NOT_FOUND, ())


async def test_messages_are_put_together_from_any_pieces() -> None:
    wire = b"".join(message(b"%d" % number) for number in range(20))
    pieces = [DataFrame(1, wire[at : at + 7]) for at in range(0, len(wire), 7)]
    ended = await call(lambda peer: [SETTINGS, head(peer), *pieces, trailers(peer, OK)])
    assert (ended.code, ended.messages) == (StatusCode.OK, [b"%d" % number for number in range(20)])


async def test_a_ping_is_answered() -> None:
    ended = await call(
        lambda peer: [SETTINGS, PingFrame(opaque_data=b"12345678"), head(peer), trailers(peer, OK)],
    )
    answers = [frame.opaque_data for frame in ended.frames if isinstance(frame, PingFrame)]
    assert answers == [b"12345678"]


async def test_leaving_resets_the_stream_and_says_goodbye() -> None:
    async with timeout(60), answering(lambda peer: [SETTINGS, head(peer)]) as (address, peers):
        async with open_call(ServerAddress(address), PATH, lambda _: None, _LIMITS):
            await asyncio.sleep(0)
        while not peers:  # noqa: ASYNC110  # the server's end of the connection
            await asyncio.sleep(0.01)
    peer = peers[0]
    assert peer.answer(1).reset == 8
    assert peer.goaway is not None
    assert peer.goaway.error_code == 0
