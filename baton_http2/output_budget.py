"""The memory of answers that clients have not read yet: a budget of the process. Over it, the slowest readers end."""

import asyncio
from collections.abc import Iterator
from typing import Final, Protocol

import structlog

log = structlog.get_logger(__name__)

# How often unread answers are counted; and how often while they are a small part of the budget, at times that other
# timers of an idle process have too.
_LOOK_SECONDS: Final = 0.1
_SELDOM_SECONDS: Final = 0.5
_SMALL: Final = 1 / 16
# Of the budget, the part from where readers are measured, and to which it is relieved.
_MEASURED: Final = 0.5
_RELIEVED: Final = 0.75
# The time over which readers are measured, at most.
_PACE_SECONDS: Final = 1.0


class AnswerReader(Protocol):
    """A client's connection, as the budget knows it."""

    @property
    def unread_bytes(self) -> int:
        """Written, or about to be, and not taken by the client."""

    @property
    def read_bytes(self) -> int:
        """Taken by the client so far."""

    def end_unread(self) -> None:
        """Ends what the client does not read, and frees its memory, at once or soon."""


class OutputBudget:
    """The budget of a process, for all its servers, on one event loop."""

    def __init__(self, process_bytes: int) -> None:
        self._process_bytes = process_bytes
        self._readers: dict[AnswerReader, None] = {}
        # When a reader was last looked at for its pace, in the loop's time, and what it had taken by then.
        self._marks: dict[AnswerReader, tuple[float, int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, reader: AnswerReader) -> None:
        """Counts what a new client does not read."""
        self._readers[reader] = None
        if self._timer is None:
            self._look_later(is_soon=True)

    def discard(self, reader: AnswerReader) -> None:
        """The client has gone."""
        self._readers.pop(reader, None)
        self._marks.pop(reader, None)
        if not self._readers and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self, *, is_soon: bool) -> None:
        loop = asyncio.get_running_loop()
        seldom = (loop.time() // _SELDOM_SECONDS + 1) * _SELDOM_SECONDS
        self._timer = loop.call_at(loop.time() + _LOOK_SECONDS if is_soon else seldom, self._look)

    def _look(self) -> None:
        unread = sum(each.unread_bytes for each in self._readers)
        self._look_later(is_soon=unread > self._process_bytes * _SMALL)
        if unread <= self._process_bytes * _MEASURED:
            self._marks.clear()
            return
        now = asyncio.get_running_loop().time()
        # Without an earlier mark no reader is known to be slow; the next look is soon.
        if unread > self._process_bytes and self._marks:
            self._end_slowest(unread, now)
        self._mark(now)

    def _mark(self, now: float) -> None:
        for reader in self._readers:
            at, _ = self._marks.get(reader, (float("-inf"), 0))
            if now - at > _PACE_SECONDS:
                self._marks[reader] = (now, reader.read_bytes)

    def _end_slowest(self, unread: int, now: float) -> None:
        ended = 0
        for reader in self._slowest_first(now):
            if unread <= self._process_bytes * _RELIEVED:
                break
            unread -= reader.unread_bytes
            ended += 1
            reader.end_unread()
        log.warning("unread answers use too much memory; the slowest readers are ended", readers=ended)

    def _slowest_first(self, now: float) -> Iterator[AnswerReader]:
        """By the bytes a second that they take, new ones last; of equally slow ones, the one with most unread first."""

        def pace(reader: AnswerReader) -> tuple[float, int]:
            at, before = self._marks.get(reader, (now, 0))
            taken = (reader.read_bytes - before) / (now - at) if now > at else float("inf")
            return taken, -reader.unread_bytes

        return iter(sorted((each for each in self._readers if each.unread_bytes), key=pace))
