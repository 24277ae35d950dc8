"""An engine in the order of SGLang: KV leaves the prefill engine only once the decode engine has allocated its blocks.

Both sides meet in a room, whose number is the state of the handoff. The decode engine allocates and says so to the
prefill engine's bootstrap server, which then sends. `Bootstrap.log` has the order of what happened.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal

from baton.errors import HandoffLost, InvalidRequest
from runtime.aio import timeout
from services.engines.answer import Finished, FinishReason, TokenLogprob, Tokens
from services.engines.base import Engine, EngineLoad, ModelFacts
from services.engines.context import EngineConfig
from services.engines.kv import KvLayout, PulledKv
from services.engines.kv_transfer import RemoteKv
from services.engines.prompt import Prompt, Sampling
from services.engines.running.generation import ClosingStream, Generation

BLOCK_TOKENS = 16
LAYOUT = KvLayout("rooms", "float32", 1, 1, 1, block_tokens=BLOCK_TOKENS, head_dim=1, block_bytes=64)
VOCABULARY = 256


class RoomsConfig(EngineConfig):
    """The engine's only setting is its kind."""

    kind: Literal["rooms"] = "rooms"


def next_token(context: tuple[int, ...]) -> int:
    """The model: a function of the whole context, so that KV of another prompt gives other tokens."""
    return (sum(index * token for index, token in enumerate(context, 1)) + 7) % VOCABULARY


@dataclass
class Room:
    """A prompt's KV, here its ids, until it was sent."""

    kv: tuple[int, ...]
    allocated: asyncio.Event = field(default_factory=asyncio.Event)
    sent: "asyncio.Future[tuple[int, ...]]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Bootstrap:
    """The rooms of all prefill engines of a test."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._rooms: dict[int, Room] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def blocks(self) -> int:
        return sum(-(-len(room.kv) // BLOCK_TOKENS) for room in self._rooms.values())

    def open(self, kv: tuple[int, ...]) -> int:
        number = next(self._numbers)
        self._rooms[number] = Room(kv)
        self.log.append("computed")
        return number

    async def receive(self, number: int) -> tuple[int, ...]:
        """The call of a decode engine with its blocks allocated. Raises HandoffLost if the room is gone."""
        room = self._rooms.get(number)
        if room is None:
            raise HandoffLost(f"room {number} is closed")
        self.log.append("allocated")
        room.allocated.set()
        async with timeout(10):
            return await room.sent

    async def send(self, number: int) -> None:
        """The sender of a prefill engine: waits for the allocation, and sends."""
        room = self._rooms[number]
        await room.allocated.wait()
        self.log.append("sent")
        if not room.sent.done():
            room.sent.set_result(room.kv)

    def close(self, number: int) -> int:
        """Frees a room's blocks; returns how many."""
        room = self._rooms.pop(number, None)
        if room is None:
            return 0
        if not room.sent.done():
            room.sent.set_exception(HandoffLost(f"room {number} was closed"))
            room.sent.exception()
        return -(-len(room.kv) // BLOCK_TOKENS)


class PromptKv:
    """The facts of a HeldKv whose prompt was computed at once, without a cache and without blocks of a pool."""

    block_ids: tuple[int, ...] = ()
    prefix_hash = b""
    cached_tokens = 0
    queue_seconds = 0.0
    compute_seconds = 0.0
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None

    def __init__(self, context: tuple[int, ...]) -> None:
        self.first_token = next_token(context)
        self.num_tokens = len(context)


class RoomKv(PromptKv):
    """An EngineHeldKv: a room, and the task that sends from it once the other side has allocated."""

    def __init__(self, bootstrap: Bootstrap, context: tuple[int, ...]) -> None:
        super().__init__(context)
        self._bootstrap = bootstrap
        self._number = bootstrap.open(context)
        self._sending = asyncio.create_task(bootstrap.send(self._number))

    @property
    def engine_state(self) -> bytes:
        return str(self._number).encode()

    def fetched(self) -> None:
        """The room is closed by `release`."""

    async def release(self) -> int:
        self._sending.cancel()
        await asyncio.wait([self._sending])
        return self._bootstrap.close(self._number)


class RoomsEngine(Engine):
    """Both sides; the blocks of a decode engine are counted from their allocation to the end of the answer."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self.allocated = 0

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts("demo", "rooms", 4096, VOCABULARY, LAYOUT)

    @property
    def kv_transfer(self) -> "RoomsEngine":
        return self

    @property
    def fetch_seconds(self) -> float:
        return 10.0

    def load(self) -> EngineLoad:
        held = self._bootstrap.blocks
        return EngineLoad(blocks_total=1000, blocks_used=self.allocated + held, blocks_held=held)

    async def prefill(self, prompt: Prompt, sampling: Sampling) -> RoomKv:
        return RoomKv(self._bootstrap, prompt.context)

    async def decode_remote(self, source: RemoteKv, sampling: Sampling) -> Generation:
        if not source.state.isdigit():
            raise InvalidRequest.of("handoff.engine_state", "is no room")
        blocks = -(-source.num_tokens // BLOCK_TOKENS)
        self.allocated += blocks
        try:
            kv = await self._bootstrap.receive(int(source.state))
        except BaseException:
            self.allocated -= blocks
            raise
        return ClosingStream(self._generated(kv, source.prompt, sampling, blocks))

    async def decode(self, source: Prompt | PulledKv, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        assert isinstance(source, Prompt)
        async for event in self._generated(source.token_ids, source, sampling, 0):
            yield event

    async def _generated(
        self, kv: tuple[int, ...], prompt: Prompt, sampling: Sampling, blocks: int
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
            self.allocated -= blocks
