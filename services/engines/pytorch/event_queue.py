"""A request's events, which wait for their reader."""

import asyncio
from collections.abc import Callable

from services.engines.pytorch.sequence import Event


class EventQueue:
    """Events in order, used in the event loop. A reader pulls all waiting events at once."""

    __slots__ = ("_arrived", "_closed", "_events", "listener")

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._closed = False
        self.listener: Callable[[], None] | None = None  # is told of each event

    def put(self, event: Event) -> None:
        """Adds an event and wakes the reader."""
        self._events.append(event)
        self._arrived.set()
        if self.listener is not None:
            self.listener()

    def close(self) -> None:
        """Wakes the reader; no more events will come."""
        self._closed = True
        self._arrived.set()

    def pull_now(self) -> list[Event]:
        """All events that are there, perhaps none."""
        events, self._events = self._events, []
        return events

    async def pull(self) -> list[Event]:
        """Returns all waiting events, at least one; none only after `close`."""
        await self._arrived.wait()
        events, self._events = self._events, []
        if not self._closed:
            self._arrived.clear()
        return events
