"""Events of prefix caches, and their delivery to any number of readers in bounded memory."""

import asyncio
import enum
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from runtime.aio import timeout


class KvTier(enum.IntEnum):
    """The tier of a cached block; a greater one is slower. Equal to the enum of the protocol."""

    DEVICE = 1
    HOST = 2
    DISK = 3


@dataclass(frozen=True, slots=True)
class KvStored:
    """Blocks that the prefix cache of a data-parallel rank now contains, by the hash chain of their prompts.

    They are in this tier, and no longer in another one.
    """

    rank: int
    block_hashes: tuple[bytes, ...]
    tier: KvTier = KvTier.DEVICE


@dataclass(frozen=True, slots=True)
class KvRemoved:
    """Blocks that the cache no longer contains."""

    rank: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """All blocks that the cache contains; replaces everything that was reported before.

    Those of the pool, that is: if there are tiers below, their blocks follow as stored ones.
    """

    rank: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KvChanged:
    """The changes of one or several steps. No block is in two lists: `moved` are those that are now in a lower tier."""

    rank: int
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    moved: tuple[KvStored, ...] = ()


KvChange = KvStored | KvRemoved | KvSnapshot | KvChanged


@runtime_checkable
class ReportsKvEvents(Protocol):
    """An engine that reports the content of its prefix cache."""

    def kv_changes(self) -> AsyncGenerator[KvChange, None]:
        """Yields snapshots, one for each rank, and then changes, without end. Raises Unsupported if events are switched
        off.
        """


# The most hashes of one message, so that a router reads a message between two tokens of its streams.
_PIECE = 1024
# The most changes that wait for a slow reader. Beyond that it gets snapshots again.
_MAX_WAITING = 65536
# The longest silence, so that a reader notices when the last message was lost.
HEARTBEAT_SECONDS = 4.0


def in_pieces(change: KvChange, most: int = _PIECE) -> Iterator[KvChange]:
    """Splits changes so that each has at most `most` hashes. The first part of a snapshot is a snapshot, the rest
    stored blocks.
    """
    match change:
        case KvChanged(rank, stored, removed, moved) if _count(change) > most:
            parts: list[KvChange] = [KvRemoved(rank, removed), KvStored(rank, stored), *moved]
            for part in parts:
                yield from in_pieces(part, most)
        case KvStored(rank, hashes, tier) if len(hashes) > most:
            for start in range(0, len(hashes), most):
                yield KvStored(rank, hashes[start : start + most], tier)
        case KvSnapshot(rank, hashes) if len(hashes) > most:
            yield KvSnapshot(rank, hashes[:most])
            for start in range(most, len(hashes), most):
                yield KvStored(rank, hashes[start : start + most])
        case KvRemoved(rank, hashes) if len(hashes) > most:
            for start in range(0, len(hashes), most):
                yield KvRemoved(rank, hashes[start : start + most])
        case _:
            yield change


def _count(change: KvChanged) -> int:
    return len(change.stored) + len(change.removed) + sum(len(each.block_hashes) for each in change.moved)


class _Reader:
    """The changes that one reader has not got yet: by rank and hash, the tier of the block; None where it is gone."""

    def __init__(self, ranks: int) -> None:
        self.waiting: list[dict[bytes, KvTier | None]] = [{} for _ in range(ranks)]
        self.has_missed = True
        self.changed = asyncio.Event()
        self.changed.set()

    def record(self, rank: int, block_hash: bytes, tier: KvTier | None) -> None:
        self.changed.set()
        if self.has_missed:
            return
        waiting = self.waiting[rank]
        waiting[block_hash] = tier
        if len(waiting) > _MAX_WAITING:
            self.has_missed = True
            for each in self.waiting:
                each.clear()


class KvPublisher:
    """The contents of an engine's prefix caches, one for each rank, reported to all readers of `changes`.

    Use it on the event loop. Changes that are made together, as by one step, are reported together. A slow reader gets
    several steps merged, and snapshots if it is too slow for that.
    """

    def __init__(self, ranks: int = 1, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._held: list[dict[bytes, KvTier]] = [{} for _ in range(ranks)]
        self._readers: dict[_Reader, None] = {}
        self._heartbeat_seconds = heartbeat_seconds

    def stored(self, block_hash: bytes, rank: int = 0, tier: KvTier = KvTier.DEVICE) -> None:
        """Adds a block, or notes its move to another tier."""
        self._held[rank][block_hash] = tier
        for reader in self._readers:
            reader.record(rank, block_hash, tier)

    def removed(self, block_hash: bytes, rank: int = 0) -> None:
        """Removes a block."""
        self._held[rank].pop(block_hash, None)
        for reader in self._readers:
            reader.record(rank, block_hash, None)

    async def changes(self) -> AsyncGenerator[KvChange, None]:
        """Yields snapshots, one for each rank, and then changes, without end."""
        reader = _Reader(len(self._held))
        self._readers[reader] = None
        try:
            while True:
                await self._await(reader)
                for change in self._pull(reader):
                    yield change
        finally:
            self._readers.pop(reader, None)

    async def _await(self, reader: _Reader) -> None:
        try:
            async with timeout(self._heartbeat_seconds):
                await reader.changed.wait()
        except TimeoutError:
            return

    def _pull(self, reader: _Reader) -> list[KvChange]:
        reader.changed.clear()
        if reader.has_missed:
            reader.has_missed = False
            return [change for rank, held in enumerate(self._held) for change in _snapshot(rank, held)]
        taken: list[KvChange] = [_changed(rank, waiting) for rank, waiting in enumerate(reader.waiting) if waiting]
        for waiting in reader.waiting:
            waiting.clear()
        return taken or [KvChanged(0, (), ())]


def _snapshot(rank: int, held: Mapping[bytes, KvTier]) -> Iterator[KvChange]:
    tiers = _by_tier(rank, held)
    yield KvSnapshot(rank, tiers.pop(KvTier.DEVICE, KvStored(rank, ())).block_hashes)
    yield from tiers.values()


def _changed(rank: int, waiting: Mapping[bytes, KvTier | None]) -> KvChanged:
    removed = tuple(block_hash for block_hash, tier in waiting.items() if tier is None)
    tiers = _by_tier(rank, {block_hash: tier for block_hash, tier in waiting.items() if tier is not None})
    stored = tiers.pop(KvTier.DEVICE, KvStored(rank, ())).block_hashes
    return KvChanged(rank, stored, removed, tuple(tiers.values()))


def _by_tier(rank: int, held: Mapping[bytes, KvTier]) -> dict[KvTier, KvStored]:
    tiers: dict[KvTier, list[bytes]] = {}
    for block_hash, tier in held.items():
        tiers.setdefault(tier, []).append(block_hash)
    return {tier: KvStored(rank, tuple(hashes), tier) for tier, hashes in tiers.items()}
