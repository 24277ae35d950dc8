"""The way back to the caller of one call, as the server that runs the call makes it: `context.reply()`."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item", covariant=True)

Trailers = tuple[tuple[str, str | bytes], ...]


class Wire(Protocol):
    """Writes the serialized messages of one call without waiting."""

    @property
    def connection(self) -> Hashable:
        """The same for all wires that are flushed together."""

    def write(self, message: bytes) -> bool:
        """Sends a message; does nothing once the call is over. False if there is no room for another one yet."""

    def flush(self) -> None:
        """Hands what was written to the connection, though this turn of the event loop goes on."""


class Source(Protocol[Item]):
    """Gives the items of one call, which are pulled."""

    async def subscribe(self, ready: Callable[[], None]) -> None:
        """Begins, and calls `ready` on the event loop whenever `pull` has something new; at once, if it has already."""

    def pull(self) -> tuple[Sequence[Item], object]:
        """The items since the last time, and something true once they were the last.

        Raises what ended the source, if it failed.
        """


def _no_wire() -> None:
    """The wire of a server that can write by waiting only: none."""


class Reply:
    """The way back to one caller.

    `open_wire` sends the answer's headers, and gives its wire; None if messages can only be sent by `write`, which
    waits.
    """

    __slots__ = ("open_wire", "set_trailing_metadata", "write")

    def __init__(
        self,
        write: Callable[[Any], Awaitable[None]],
        set_trailing_metadata: Callable[[Trailers], None],
        open_wire: Callable[[], Wire | None] = _no_wire,
    ) -> None:
        self.write = write
        self.set_trailing_metadata = set_trailing_metadata
        self.open_wire = open_wire

    async def write_from(self, source: Source[Item], message_of: Callable[[Sequence[Item]], Any]) -> int:
        """Sends what a source gives until its last items, as messages. Returns how many they were.

        Raises what the source raises.
        """
        changed = asyncio.Event()
        await source.subscribe(changed.set)
        count, is_last = 0, False
        while not is_last:
            await changed.wait()
            changed.clear()
            items, end = source.pull()
            count, is_last = count + len(items), bool(end)
            if items:
                await self.write(message_of(items))
        return count
