"""Changes of a prefix cache, told to all readers; a slow one gets a snapshot in the place of what it has missed."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from services.engines.trtllm.kv_index import KvIndex
from services.kv_events import KvChange

_MAX_WAITING = 10_000


class _Reader:
    def __init__(self) -> None:
        self.waiting: list[KvChange] = []
        self.has_missed = True
        self.changed = asyncio.Event()
        self.changed.set()


class FanOut:
    """What an index says, told to everybody who reads `changes`."""

    def __init__(self, index: KvIndex) -> None:
        self._index = index
        self._readers: set[_Reader] = set()

    def tell(self, changes: Sequence[KvChange]) -> None:
        """Never waits for a reader."""
        for reader in self._readers:
            reader.waiting += changes
            if len(reader.waiting) > _MAX_WAITING:
                reader.waiting.clear()
                reader.has_missed = True
            reader.changed.set()

    async def changes(self) -> AsyncGenerator[KvChange, None]:
        """Snapshots first, one for each rank, and then what changes."""
        reader = _Reader()
        self._readers.add(reader)
        try:
            while True:
                await reader.changed.wait()
                reader.changed.clear()
                for change in self._take(reader):
                    yield change
        finally:
            self._readers.discard(reader)

    def _take(self, reader: _Reader) -> list[KvChange]:
        taken, reader.waiting = reader.waiting, []
        if reader.has_missed:
            reader.has_missed = False
            return [*self._index.snapshots()]
        return taken
