"""h2, a strict implementation of RFC 9113, as the client: it raises for whatever it may not be sent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, TrailersReceived, WindowUpdated
from h2.settings import SettingCodes
from support.http2.peer import head, message
from support.http2.server import echoing

from runtime.aio import timeout


class Client:
    """A connection that acknowledges what it receives, and keeps the events of each stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.events: dict[int, list[Event]] = {}

    async def begin(self, method: str, *contents: bytes) -> int:
        """Sends a call; its stream."""
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, head(method))
        body = b"".join(message(content) for content in contents)
        while body:
            size = min(len(body), self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
            if size:
                self.h2.send_data(stream_id, body[:size])
                body = body[size:]
            else:
                await self.receive()
        self.h2.end_stream(stream_id)
        await self.flush()
        return stream_id

    async def answer(self, stream_id: int) -> tuple[bytes, dict[str, str]]:
        """The bytes and the trailers of a stream, which came in their order."""
        async with timeout(20):
            while not any(isinstance(event, StreamEnded) for event in self.events.get(stream_id, ())):
                await self.receive()
        events = [event for event in self.events[stream_id] if not isinstance(event, WindowUpdated)]
        assert isinstance(events[0], ResponseReceived)
        trailers = next(event for event in events if isinstance(event, TrailersReceived))
        data = b"".join(event.data for event in events if isinstance(event, DataReceived))
        return data, {str(name): str(value) for name, value in trailers.headers}

    async def receive(self) -> None:
        """The frames that have come."""
        for event in self.h2.receive_data(await self._reader.read(65_536)):
            if isinstance(event, DataReceived):
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            self.events.setdefault(getattr(event, "stream_id", 0) or 0, []).append(event)
        await self.flush()

    async def flush(self) -> None:
        """The bytes to send."""
        self._writer.write(self.h2.data_to_send())
        await self._writer.drain()


@asynccontextmanager
async def client(settings: dict[SettingCodes, int] | None = None) -> AsyncIterator[Client]:
    async with echoing() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        talking = Client(reader, writer)
        talking.h2.initiate_connection()
        if settings:
            talking.h2.update_settings(settings)
        await talking.flush()
        yield talking
        writer.close()


async def test_calls_one_after_the_other() -> None:
    async with client() as talking:
        for number in range(20):
            content = b"%d" % number * 100
            assert await talking.answer(await talking.begin("unary", content)) == (
                message(content),
                {"grpc-status": "0"},
            )


async def test_calls_at_the_same_time() -> None:
    async with client() as talking:
        streams = [await talking.begin("count", b"50") for _ in range(50)]
        expected = b"".join(message(b"%d" % number) for number in range(50))
        assert {(await talking.answer(stream))[0] for stream in streams} == {expected}


async def test_a_megabyte_there_and_back() -> None:
    async with client() as talking:
        data, _ = await talking.answer(await talking.begin("unary", bytes(1_000_000)))
        assert data == message(bytes(1_000_000))


async def test_small_windows_and_no_table() -> None:
    settings: dict[SettingCodes, Any] = {SettingCodes.INITIAL_WINDOW_SIZE: 100, SettingCodes.HEADER_TABLE_SIZE: 0}
    async with client(settings) as talking:
        for _ in range(3):
            data, _ = await talking.answer(await talking.begin("unary", bytes(3000)))
            assert data == message(bytes(3000))
