"""An engine in SGLang's default order: the decode side allocates, then the prefill side computes, and sends as it goes.

A room is a number and the port of the decode engine's receiver. So either side may be a process of its own:
`python -m support.engines.allocating_rooms CONFIG key=value...` is `python -m services` with this engine.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from support.engines.rooms import BLOCK_TOKENS, LAYOUT, VOCABULARY, PromptKv, next_token

from baton.errors import HandoffLost, InvalidRequest, Overloaded
from runtime.aio import timeout
from services.__main__ import main
from services.engines.answer import Finished, FinishReason, Tokens
from services.engines.base import Engine, EngineLoad, ModelFacts
from services.engines.context import EngineConfig
from services.engines.kv import PulledKv
from services.engines.kv_transfer import RemoteKv
from services.engines.prompt import Prompt, Sampling
from services.engines.registry import ENGINES, EngineKind
from services.engines.running.generation import ClosingStream, Generation

Note = Callable[[str], None]
SECONDS = 20.0


class AllocatingRoomsConfig(EngineConfig):
    """`block_seconds` is how long the KV of a block is computed."""

    kind: Literal["allocating_rooms"] = "allocating_rooms"
    num_blocks: int = 1000
    block_seconds: float = 0.0


@dataclass(eq=False)
class Destination:
    """The decode side of a room: blocks, and the KV that has come into them, here its ids."""

    number: int
    port: int
    blocks: int
    num_tokens: int
    close: Callable[["Destination"], int]
    kv: list[int] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    is_lost: bool = False
    block_ids: tuple[int, ...] = ()

    @property
    def engine_state(self) -> bytes:
        return json.dumps({"room": self.number, "port": self.port}).encode()

    async def release(self) -> int:
        return self.close(self)


class SentKv(PromptKv):
    """The KV that the prefill side has sent; its own blocks are held until `release`."""

    def __init__(self, context: tuple[int, ...], room: int, free: Callable[[], int]) -> None:
        super().__init__(context)
        self.engine_state = str(room).encode()
        self._free: Callable[[], int] | None = free

    def fetched(self) -> None:
        """Nothing is left to send."""

    async def release(self) -> int:
        free, self._free = self._free, None
        return free() if free else 0


class AllocatingRoomsEngine(Engine):
    """Both sides. `note` gets what happens, and `gate` must be set for a prompt to be computed."""

    def __init__(self, config: AllocatingRoomsConfig, note: Note = lambda text: None) -> None:
        self.allocated = self.held = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._config = config
        self._note = note
        self._numbers = itertools.count(1)
        self._rooms: dict[int, Destination] = {}

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts("demo", "allocating_rooms", 4096, VOCABULARY, LAYOUT)

    @property
    def kv_transfer(self) -> "AllocatingRoomsEngine":
        return self

    @property
    def fetch_seconds(self) -> float:
        return SECONDS

    def load(self) -> EngineLoad:
        used = self.allocated + self.held
        return EngineLoad(blocks_total=self._config.num_blocks, blocks_used=used, blocks_held=self.held)

    @asynccontextmanager
    async def serving(self) -> "AsyncIterator[AllocatingRoomsEngine]":
        """The engine, receiving."""
        server = await asyncio.start_server(self._receive, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    # The decode side.

    async def allocate(self, prompt: Prompt, sampling: Sampling, prefill_address: str) -> Destination:
        blocks = _blocks(len(prompt.context))
        if self.allocated + blocks > self._config.num_blocks:
            raise Overloaded("the pool is full")
        self.allocated += blocks
        room = Destination(next(self._numbers), self._port, blocks, len(prompt.context), self._close)
        self._rooms[room.number] = room
        self._note(f"allocated for {prefill_address}")
        return room

    def _close(self, room: Destination) -> int:
        if self._rooms.pop(room.number, None) is None:
            return 0
        self.allocated -= room.blocks
        return room.blocks

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One room's KV: a line with its number, then one with the ids of each block. A closed room takes nothing."""
        room = self._rooms.get(int(await reader.readline()))
        try:
            writer.write(b"allocated\n" if room else b"closed\n")
            while room and (line := await reader.readline()):
                if room.number not in self._rooms:
                    return
                room.kv += json.loads(line)
                if len(room.kv) == room.num_tokens:
                    room.arrived.set()
        finally:
            if room and not room.arrived.is_set():
                room.is_lost = True
                room.arrived.set()
            writer.close()

    async def decode_remote(self, source: RemoteKv, sampling: Sampling) -> Generation:
        room = source.destination
        if not isinstance(room, Destination):
            raise InvalidRequest.of("destination_id", "is empty: this engine allocates first")
        try:
            if source.state != str(room.number).encode():
                raise InvalidRequest.of("handoff.engine_state", "is of another room")
            async with timeout(SECONDS):
                await room.arrived.wait()
            if room.is_lost:
                raise HandoffLost("the sender is gone")
        except BaseException:
            self._close(room)
            raise
        return ClosingStream(self._generated(tuple(room.kv), source.prompt, sampling, room))

    async def decode(self, source: Prompt | PulledKv, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        assert isinstance(source, Prompt)
        async for event in self._generated(source.token_ids, source, sampling, None):
            yield event

    async def _generated(
        self, kv: tuple[int, ...], prompt: Prompt, sampling: Sampling, room: Destination | None
    ) -> AsyncGenerator[Tokens | Finished, None]:
        try:
            ids = prompt.emitted
            while len(ids) < sampling.max_tokens:
                await asyncio.sleep(0)
                token = next_token((*kv, *ids))
                ids = (*ids, token)
                yield Tokens((token,))
            yield Finished(FinishReason.LENGTH, len(prompt.token_ids))
        finally:
            if room:
                self._close(room)

    # The prefill side.

    async def prefill_into(self, prompt: Prompt, sampling: Sampling, destination: bytes) -> SentKv:
        number, port = _read_room(destination)
        blocks = _blocks(len(prompt.context))
        self.held += blocks
        try:
            await self._send(prompt.context, number, port)
        except BaseException as error:
            self.held -= blocks
            self._note("aborted" if isinstance(error, asyncio.CancelledError) else "failed")
            raise

        def free() -> int:
            self.held -= blocks
            return blocks

        return SentKv(prompt.context, number, free)

    async def _send(self, context: tuple[int, ...], number: int, port: int) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            raise HandoffLost(f"the receiver of room {number} is gone") from error
        try:
            writer.write(b"%d\n" % number)
            if await reader.readline() != b"allocated\n":
                raise HandoffLost(f"room {number} is closed")
            self._note("computing")
            await self.gate.wait()
            for start in range(0, len(context), BLOCK_TOKENS):
                await asyncio.sleep(self._config.block_seconds)
                if writer.is_closing():
                    raise HandoffLost(f"the receiver of room {number} is gone")
                writer.write(json.dumps(context[start : start + BLOCK_TOKENS]).encode() + b"\n")
                await writer.drain()
            self._note("sent")
        except (OSError, RuntimeError) as error:  # the latter is uvloop's, for a connection that was lost
            raise HandoffLost(f"the receiver of room {number} is gone") from error
        finally:
            writer.close()


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _read_room(state: bytes) -> tuple[int, int]:
    try:
        read = json.loads(state)
        return int(read["room"]), int(read["port"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest.of("destination.engine_state", "is no room") from error


if __name__ == "__main__":
    ENGINES["allocating_rooms"] = EngineKind(
        AllocatingRoomsConfig, lambda config, context: AllocatingRoomsEngine(config).serving()
    )
    main()
