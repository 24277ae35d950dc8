"""A publisher of KV events on real ZeroMQ sockets, which can lose some and keeps a few for a replay."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import zmq
import zmq.asyncio

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """The `ZmqEventPublisher` of vLLM and SGLang on the wire: numbered batches, and those it still has on demand.

    Numbers begin with 0, and are those of frames: topic, number, `[time, events, rank]`. A demand names the first
    number; the answers end with the number -1.
    """

    def __init__(self, kept: int = 100) -> None:
        self._kept = kept
        self._buffer: list[bytes] = []
        self.demands: list[int] = []
        self.answers = True

    @asynccontextmanager
    async def open(self, events: str, replay: str) -> AsyncIterator["Publisher"]:
        context = zmq.asyncio.Context()
        self._out, self._demanded = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self._out.bind(events)
        self._demanded.bind(replay)
        answering = asyncio.create_task(self._answer())
        try:
            yield self
        finally:
            answering.cancel()
            await asyncio.wait([answering])
            context.destroy(linger=0)

    async def subscribed(self) -> None:
        """Waits for the reader's subscription."""
        assert await asyncio.wait_for(self._out.recv(), 60) == b"\x01"

    def lose(self, *events: object) -> None:
        """A batch that does not arrive, as if the socket's queue were full."""
        self._buffer.append(msgspec.msgpack.encode([1.5, events, 0]))

    async def publish(self, *events: object) -> None:
        self.lose(*events)
        await self.send(len(self._buffer) - 1)

    async def send(self, number: int, payload: bytes | None = None) -> None:
        frames = [b"", number.to_bytes(8, "big"), self._buffer[number] if payload is None else payload]
        await self._out.send_multipart(frames)

    async def _answer(self) -> None:
        while True:
            client, empty, start = await self._demanded.recv_multipart()
            self.demands.append(first := int.from_bytes(start, "big"))
            if not self.answers:
                continue
            for number in range(max(first, len(self._buffer) - self._kept), len(self._buffer)):
                frames = [client, empty, number.to_bytes(8, "big"), self._buffer[number]]
                await self._demanded.send_multipart(frames)
            await self._demanded.send_multipart([client, empty, END, b""])
