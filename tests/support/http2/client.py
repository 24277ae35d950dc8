"""An HTTP/2 client that sends what gRPC's own refuses to send."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import h2.config
import h2.connection
import h2.events

Headers = Sequence[tuple[bytes, bytes]]


class RawClient:
    """One connection to a gRPC server, without any checks of headers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        config = h2.config.H2Configuration(
            validate_outbound_headers=False, normalize_outbound_headers=False, header_encoding="utf-8"
        )
        self.connection = h2.connection.H2Connection(config)
        self.connection.initiate_connection()

    async def flush(self) -> None:
        self._writer.write(self.connection.data_to_send())
        await self._writer.drain()

    async def answer(self) -> None:
        """Reads what comes, and answers the server's PING and SETTINGS, until the connection is closed."""
        while received := await self._reader.read(65536):
            self.connection.receive_data(received)
            await self.flush()

    def begin(self, method: str, metadata: Headers = ()) -> int:
        """A stream with the headers of a call to `/package.Service/Method`; nothing is sent before `flush`."""
        stream = self.connection.get_next_available_stream_id()
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", method.encode()),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *metadata,
        ]
        self.connection.send_headers(stream, headers)
        return stream

    async def call(self, method: str, message: bytes, metadata: Headers = ()) -> dict[str, str]:
        """The trailers that a call ends with."""
        stream = self.begin(method, metadata)
        self.connection.send_data(stream, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
        await self.flush()
        trailers: dict[str, str] = {}
        while True:
            received = await self._reader.read(65536)
            assert received, "the server has closed the connection"
            for event in self.connection.receive_data(received):
                if isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
                    trailers.update({_text(key): _text(value) for key, value in event.headers or ()})
                if isinstance(event, h2.events.StreamEnded) and event.stream_id == stream:
                    return trailers
            await self.flush()


@asynccontextmanager
async def raw_client(address: str) -> AsyncGenerator[RawClient, None]:
    """A connection to `host:port` while the context is open."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        client = RawClient(reader, writer)
        await client.flush()
        yield client
    finally:
        writer.transport.abort()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
