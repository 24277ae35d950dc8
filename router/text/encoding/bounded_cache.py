"""Remembers what was used last, in bounded memory."""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """A cache of at most `most_bytes`. Safe to use from several threads.

    It has two generations. What is found in the older one moves to the newer one, and when that is full it becomes the
    older one, whose entries are dropped. So an entry that is in use stays, and finding one in the newer generation
    writes nothing. Entries over a sixteenth of the size are not kept.
    """

    def __init__(
        self,
        most_bytes: int,
        size_of: Callable[[Key, Value], int],
        new_generation: Callable[[], dict[Key, Value]] = dict,
    ) -> None:
        self._generation_bytes = most_bytes // 2
        self._size_of = size_of
        self._new_generation = new_generation
        self._writing = Lock()
        self.newer = new_generation()
        self._older = new_generation()
        self._newer_bytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self.newer or key in self._older

    def get(self, key: Key) -> Value | None:
        """The value, or None."""
        value = dict.get(self.newer, key)
        if value is None and (value := dict.get(self._older, key)) is not None:
            self.put(key, value)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Remembers the value."""
        size = self._size_of(key, value)
        if size > self._generation_bytes // 8:
            return
        with self._writing:
            if self._newer_bytes + size > self._generation_bytes:
                self._older, self.newer, self._newer_bytes = self.newer, self._new_generation(), 0
            self.newer[key] = value
            self._newer_bytes += size
