"""The two sides of a bootstrap room: the blocks that a decode engine has allocated, and KV that a prefill has sent."""

import json
from collections.abc import Awaitable, Callable

from baton.errors import InvalidRequest
from services.engines.external.held_kv import ExternalKv
from services.engines.sglang import metrics
from services.engines.sglang.requests import SglangGeneration

_MOST = 1 << 62


def write_room(number: int) -> bytes:
    """Serializes a room for the other side."""
    return json.dumps({"room": number}).encode()


def read_room(state: bytes, name: str) -> int:
    """Returns the number of a room. Raises InvalidRequest, about the field `name`, for a state that is none."""
    try:
        number = json.loads(state)["room"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest.of(name, "is no room of SGLang") from error
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= _MOST:
        raise InvalidRequest.of(name, "is no room of SGLang")
    return number


class SglangDestination:
    """An EngineDestination: a request of a decode engine, which waits for the KV of its room.

    Closing it aborts the request. Its blocks are not given out for `closing_seconds` then, by inside/scheduler.py.
    """

    block_ids: tuple[int, ...] = ()

    def __init__(
        self, room: int, generation: SglangGeneration, drop: Callable[[SglangGeneration], Awaitable[None]], blocks: int
    ) -> None:
        self.generation = generation
        self.engine_state = write_room(room)
        self._drop = drop
        self._blocks = blocks
        self._is_open = True
        metrics.ROOMS.inc()

    @property
    def blocks(self) -> int:
        """Its blocks while it waits; 0 once it is given up or used."""
        return self._blocks if self._is_open else 0

    def use(self) -> SglangGeneration:
        """The request, whose owner the caller is from now on."""
        self._close()
        return self.generation

    async def release(self) -> int:
        """Closes the room. Returns the number of blocks that are free; 0 if it was closed already."""
        blocks = self.blocks
        if self._is_open:
            self._close()
            metrics.CLOSED_ROOMS.inc()
            await self._drop(self.generation)
        return blocks

    def _close(self) -> None:
        if self._is_open:
            metrics.ROOMS.dec()
        self._is_open = False


class SentKv(ExternalKv):
    """KV that is in the other engine already: this one holds nothing."""

    async def release(self) -> int:
        """Nothing is left to release."""
        return 0
