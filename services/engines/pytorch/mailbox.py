"""Where a request's events wait until somebody reads them."""

import asyncio

from services.engines.pytorch.sequence import Event


class Mailbox:
    """Events in order. Lives in the event loop; a reader takes all that are there at once."""

    __slots__ = ("_arrived", "_closed", "_events")

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._closed = False

    def put(self, event: Event) -> None:
        """Adds an event and wakes the reader."""
        self._events.append(event)
        self._arrived.set()

    def close(self) -> None:
        """Wakes the reader for good: nothing more will come."""
        self._closed = True
        self._arrived.set()

    async def take(self) -> list[Event]:
        """All events that are there, at least one; none only after `close`."""
        await self._arrived.wait()
        events, self._events = self._events, []
        if not self._closed:
            self._arrived.clear()
        return events
