"""A peer that speaks HTTP/2 frame by frame, rightly or wrongly: frames by hyperframe, header blocks by hpack."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from hpack import Decoder, Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from support.http2.server import path

from runtime.aio import timeout

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PATIENCE_SECONDS = 60.0
_FRAME_BYTES = 16_384


def message(content: bytes, *, compressed: int = 0) -> bytes:
    """The message as gRPC frames it."""
    return bytes([compressed]) + len(content).to_bytes(4, "big") + content


def head(method: str, /, *more: tuple[str, str], **replaced: str | None) -> list[tuple[str, str]]:
    """The headers of a call. `replaced` has underscores for hyphens, and None for what is left out."""
    own: dict[str, str | None] = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path(method),
        ":authority": "test",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    names = {name.strip(":").replace("-", "_"): name for name in own}
    for name, value in replaced.items():
        own[names.get(name, name.replace("_", "-"))] = value
    return [*((name, value) for name, value in own.items() if value is not None), *more]


@dataclass(slots=True)
class Answer:
    """The frames of one stream."""

    headers: list[dict[str, str]] = field(default_factory=list)
    data: bytes = b""
    data_frames: list[int] = field(default_factory=list)
    reset: int | None = None
    is_ended: bool = False

    @property
    def status(self) -> int | None:
        """gRPC's; None as long as there is none."""
        found = [block["grpc-status"] for block in self.headers if "grpc-status" in block]
        return int(found[-1]) if found else None

    @property
    def messages(self) -> list[bytes]:
        found, at = [], 0
        while at < len(self.data):
            length = int.from_bytes(self.data[at + 1 : at + 5], "big")
            found.append(self.data[at + 5 : at + 5 + length])
            at += 5 + length
        return found


class Peer:
    """One connection. What is received is kept in `answers`, `frames` and `goaway`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.answers: dict[int, Answer] = {}
        self.frames: list[Frame] = []
        self.goaway: GoAwayFrame | None = None
        self.goaways: list[GoAwayFrame] = []
        self.is_closed = False
        self._is_introduced = False

    async def introduce(self, **settings: int) -> None:
        """The preface, and SETTINGS."""
        self._is_introduced = True
        values = {getattr(SettingsFrame, name): value for name, value in settings.items()}
        await self.send(PREFACE, SettingsFrame(settings=values))

    async def send(self, *frames: "Frame | bytes") -> None:
        """Frames, or bytes that are taken for some. The server may have closed the connection meanwhile."""
        try:
            self._writer.write(b"".join(each if isinstance(each, bytes) else each.serialize() for each in frames))
            await self._writer.drain()
        except (ConnectionError, OSError):
            self.is_closed = True

    def block(self, headers: Iterable[tuple[str, str]]) -> bytes:
        return self.encoder.encode(headers)

    async def call(self, stream_id: int, method: str, *messages: bytes, end: bool = True, **replaced: Any) -> None:
        """Begins a call, and sends messages."""
        headers = HeadersFrame(stream_id, self.block(head(method, **replaced)), flags=["END_HEADERS"])
        body = b"".join(message(each) for each in messages)
        data = [DataFrame(stream_id, body[at : at + _FRAME_BYTES]) for at in range(0, len(body), _FRAME_BYTES)]
        if end:
            data.append(DataFrame(stream_id, flags=["END_STREAM"]))
        await self.send(headers, *data)

    async def until(self, condition: Any, seconds: float = _PATIENCE_SECONDS) -> None:
        """Receives until the condition holds, or the connection is closed and then it must."""
        async with timeout(seconds):
            while not condition() and not self.is_closed:
                await self._receive()
        assert condition(), f"the connection was closed: {self.goaway}, {self.answers}"

    def answer(self, stream_id: int) -> Answer:
        """The frames so far."""
        return self.answers.setdefault(stream_id, Answer())

    async def ended(self, stream_id: int) -> Answer:
        """The whole answer of a stream."""
        answer = self.answer(stream_id)
        await self.until(lambda: answer.is_ended or answer.reset is not None)
        return answer

    async def closed(self) -> int | None:
        """Waits until the server closes the connection; the code of its GOAWAY."""
        await self.until(lambda: self.is_closed)
        return self.goaway.error_code if self.goaway else None

    def close(self) -> None:
        """Closes the connection once what was sent has gone out."""
        self._writer.close()

    async def ping(self) -> None:
        """Waits until what was sent so far has been read."""
        opaque = b"%08d" % len(self.frames)
        await self.send(PingFrame(opaque_data=opaque))
        await self.until(
            lambda: any(isinstance(each, PingFrame) and each.opaque_data == opaque for each in self.frames)
        )

    async def _receive(self) -> None:
        try:
            header = await self._reader.readexactly(9)
            frame, length = Frame.parse_frame_header(memoryview(header))
            frame.parse_body(memoryview(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_closed = True
            return
        self.frames.append(frame)
        answer = self.answer(frame.stream_id)
        if isinstance(frame, (HeadersFrame, ContinuationFrame)):
            assert "END_HEADERS" in frame.flags, "the tests' answers fit into a frame"
            answer.headers.append({str(name): str(value) for name, value in self.decoder.decode(frame.data)})
        elif isinstance(frame, DataFrame):
            answer.data += frame.data
            answer.data_frames.append(len(frame.data))
        elif isinstance(frame, RstStreamFrame):
            answer.reset = frame.error_code
        elif isinstance(frame, GoAwayFrame):
            self.goaway = frame
            self.goaways.append(frame)
        elif isinstance(frame, SettingsFrame) and "ACK" not in frame.flags and self._is_introduced:
            await self.send(SettingsFrame(flags=["ACK"]))
        elif isinstance(frame, PingFrame) and "ACK" not in frame.flags:
            await self.send(PingFrame(opaque_data=frame.opaque_data, flags=["ACK"]))
        if "END_STREAM" in frame.flags and isinstance(frame, (HeadersFrame, DataFrame)):
            answer.is_ended = True


def opened(stream_id: int, increment: int) -> WindowUpdateFrame:
    """A window that is opened."""
    return WindowUpdateFrame(stream_id, window_increment=increment)


@asynccontextmanager
async def silent_peer(port: int) -> AsyncGenerator[Peer, None]:
    """A connection on which nothing was sent yet."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()


@asynccontextmanager
async def peer_of(port: int, **settings: int) -> AsyncGenerator[Peer, None]:
    """A connection with its first frames sent."""
    async with silent_peer(port) as peer:
        await peer.introduce(**settings)
        yield peer
