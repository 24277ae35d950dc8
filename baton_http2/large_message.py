"""A message of more than a stream's window: all its bytes are counted before its peer may send more of it."""

from collections.abc import Callable

from baton_http2.input_budget import Reservation


class LargeMessage:
    """Of one stream, the bytes that are counted and have not come, and those that wait to be counted."""

    __slots__ = ("_counted", "_reservation", "_reserve")

    def __init__(self, reserve: Callable[[int], Reservation | None]) -> None:
        self._reserve = reserve  # None if that is done, and else `add` is called later
        self._counted = 0
        self._reservation: Reservation | None = None

    @property
    def waits(self) -> bool:
        """True if bytes wait to be counted."""
        return self._reservation is not None

    def beyond_counted(self, more: int) -> int:
        """The number of bytes, of `more` that have come, that were not counted before."""
        counted = min(more, self._counted)
        self._counted -= counted
        return more - counted

    def is_counted(self, missing: int) -> bool:
        """True if all that is still to come is counted; if not, it waits for that."""
        if self._reservation is None and missing > self._counted:
            size = missing - self._counted
            self._reservation = self._reserve(size)
            if self._reservation is None:
                self._counted += size
        return self._reservation is None

    def add(self, size: int) -> None:
        """The bytes that it waited for are counted."""
        self._reservation = None
        self._counted += size

    def drop(self) -> int:
        """Waits for no more; returns the bytes that are counted and have not come, for the caller to give back."""
        if self._reservation is not None:
            self._reservation.cancel()
            self._reservation = None
        counted, self._counted = self._counted, 0
        return counted
