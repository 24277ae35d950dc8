"""The contents of TensorRT-LLM's prefix cache, by the hash chain that routers know from other engines.

The engine's own hashes mean nothing outside it. They are numbers, or text with its second cache manager, which also
reports each group of layers separately. A lost event cannot be requested again; all known blocks are then forgotten,
since a block that is wrongly believed to be cached costs more than an unknown one.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog

from engine_protocol.prefix_hash import block_hash, root_hash
from runtime.aio import timeout
from services.engines.kv_events import HEARTBEAT_SECONDS, KvChange, KvChanged, KvRemoved, KvSnapshot, KvStored

log = structlog.get_logger(__name__)

_UNSIGNED = 2**64 - 1
# An engine of a version that writes events in another way.
_UNREADABLE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
# Of one rank. A long-lived engine that does not say what it removes would fill the worker's memory.
_MOST_BLOCKS = 2**20
_MOST_RANKS = 512


@dataclass(slots=True)
class _Rank:
    """The cache of one attention-DP rank.

    `groups` are the groups of layers of the widest window, and `holders` the groups that hold a block. Only a block
    that all of them hold saves anything. `ours` has the chain hash of each block. Keys are the engine's hashes.
    """

    last_event: int | None = None
    groups: set[int] = field(default_factory=set)
    holders: dict[int | str, set[int]] = field(default_factory=dict)
    ours: dict[int | str, bytes] = field(default_factory=dict)

    def is_cached(self, theirs: int | str) -> bool:
        return self.holders.get(theirs, set()) >= self.groups

    def cached(self) -> tuple[bytes, ...]:
        return tuple(ours for theirs, ours in self.ours.items() if self.is_cached(theirs))

    def clear(self) -> None:
        self.holders.clear()
        self.ours.clear()


class ReportedBlocks:
    """Converts events, in order, into changes of the cache."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ranks: dict[int, _Rank] = {}
        self._window = 0
        self.gaps = 0

    def snapshots(self) -> list[KvSnapshot]:
        """Returns the cached blocks, one snapshot for each rank and at least one."""
        ranks = self._ranks or {0: _Rank()}
        return [KvSnapshot(number, rank.cached()) for number, rank in sorted(ranks.items())]

    def feed(self, event: Mapping[str, Any]) -> list[KvChange]:
        """Returns the changes for an event; most events that are not of whole blocks of text cause none.

        After one that cannot be read all known blocks are forgotten, as after one that was lost.
        """
        try:
            changes = self._feed(event)
            if len(self._ranks) > _MOST_RANKS or any(len(rank.ours) > _MOST_BLOCKS for rank in self._ranks.values()):
                raise ValueError("more blocks than an engine has")
        except _UNREADABLE as error:
            if not self.gaps:
                log.warning("a KV event cannot be read", error=f"{type(error).__name__}: {error}")
            self.gaps += 1
            return self._forget_all()
        return changes

    def _forget_all(self) -> list[KvChange]:
        known = [number for number, rank in self._ranks.items() if rank.cached()]
        self._ranks.clear()
        return [KvSnapshot(number, ()) for number in known]

    def _feed(self, event: Mapping[str, Any]) -> list[KvChange]:
        number, group = int(event.get("attention_dp_rank") or 0), int(event.get("layer_group_id") or 0)
        rank = self._ranks.setdefault(number, _Rank())
        changes: list[KvChange] = self._gap(number, rank, int(event["event_id"]))
        changes += self._widen(event.get("window_size"))
        if event.get("window_size") not in (None, self._window):
            # The blocks of a sliding window contain only a part of what a prompt needs.
            return changes
        changes += self._add_group(number, rank, group)
        content = event["data"]
        match content["type"]:
            case "stored":
                return changes + self._stored(number, rank, group, content)
            case "removed":
                return changes + self._removed(number, rank, group, content["block_hashes"])
            case _:
                return changes

    def _gap(self, number: int, rank: _Rank, event_id: int) -> list[KvChange]:
        expected = event_id if rank.last_event is None else rank.last_event + 1
        rank.last_event = event_id
        if event_id == expected:
            return []
        self.gaps += 1
        rank.clear()
        return [KvSnapshot(number, ())]

    def _widen(self, window: int | None) -> list[KvChange]:
        """Notes the widest window, which is the whole context. Blocks of the previous widest one are forgotten."""
        if window is None or window <= self._window:
            return []
        known = [number for number, rank in self._ranks.items() if rank.cached()]
        self._window = window
        for rank in self._ranks.values():
            rank.clear()
            rank.groups.clear()
        return [KvSnapshot(number, ()) for number in known]

    def _add_group(self, number: int, rank: _Rank, group: int) -> list[KvChange]:
        """Adds a group of layers; it contains none of the known blocks yet."""
        if group in rank.groups:
            return []
        had = rank.cached()
        rank.groups.add(group)
        return [KvSnapshot(number, ())] if had else []

    def _stored(self, number: int, rank: _Rank, group: int, content: Mapping[str, Any]) -> list[KvChange]:
        parent = content["parent_hash"]
        previous = None if parent is None else rank.ours.get(_key(parent))
        is_known = parent is None or previous is not None
        new: list[bytes] = []
        for block in content["blocks"]:
            theirs = _key(block["block_hash"])
            tokens = [token["token_id"] for token in block["tokens"]]
            # Blocks after an unknown one have no chain hash.
            is_known = is_known and self._is_whole_text(tokens, block)
            if not is_known:
                continue
            previous = block_hash(previous or root_hash(block.get("cache_salt") or ""), tokens)
            if self._hold(rank, group, theirs, previous):
                new.append(previous)
        return [KvStored(number, tuple(new))] if new else []

    def _hold(self, rank: _Rank, group: int, theirs: int | str, ours: bytes) -> bool:
        """Notes the block in this group. Returns whether this was the last group without it."""
        was_cached = theirs in rank.ours and rank.is_cached(theirs)
        rank.ours[theirs] = ours
        rank.holders.setdefault(theirs, set()).add(group)
        return not was_cached and rank.is_cached(theirs)

    def _is_whole_text(self, tokens: Sequence[object], block: Mapping[str, Any]) -> bool:
        """False for a partly filled last block, and for one with an image, whose ids may be digests, as text."""
        whole = len(tokens) == self._block_tokens and not block.get("mm_keys")
        return whole and all(isinstance(token, int) for token in tokens)

    def _removed(self, number: int, rank: _Rank, group: int, hashes: Sequence[int | str]) -> list[KvChange]:
        gone = []
        for theirs in map(_key, hashes):
            if theirs not in rank.ours:
                continue
            if rank.is_cached(theirs):
                gone.append(rank.ours[theirs])
            rank.holders[theirs].discard(group)
            if not rank.holders[theirs]:
                del rank.holders[theirs], rank.ours[theirs]
        return [KvRemoved(number, tuple(gone))] if gone else []


def _key(theirs: int | str) -> int | str:
    """Converts a hash; numbers have 64 bits, with or without a sign."""
    return theirs & _UNSIGNED if isinstance(theirs, int) else theirs


_MAX_WAITING = 10_000


class _Reader:
    def __init__(self) -> None:
        self.waiting: list[KvChange] = []
        self.has_missed = True
        self.changed = asyncio.Event()
        self.changed.set()


class FanOut:
    """Sends the changes of an index to all readers of `changes`.

    A reader that falls behind gets a snapshot instead of the changes that it missed.
    """

    def __init__(self, index: ReportedBlocks) -> None:
        self._index = index
        self._readers: set[_Reader] = set()

    def tell(self, changes: Sequence[KvChange]) -> None:
        """Queues changes for all readers without waiting."""
        for reader in self._readers:
            reader.waiting += changes
            if len(reader.waiting) > _MAX_WAITING:
                reader.waiting.clear()
                reader.has_missed = True
            reader.changed.set()

    async def changes(self) -> AsyncGenerator[KvChange, None]:
        """Yields a snapshot of each rank, and then changes."""
        reader = _Reader()
        self._readers.add(reader)
        try:
            while True:
                with suppress(TimeoutError):
                    async with timeout(HEARTBEAT_SECONDS):
                        await reader.changed.wait()
                reader.changed.clear()
                for change in self._pull(reader) or [KvChanged(0, (), ())]:
                    yield change
        finally:
            self._readers.discard(reader)

    def _pull(self, reader: _Reader) -> list[KvChange]:
        taken, reader.waiting = reader.waiting, []
        if reader.has_missed:
            reader.has_missed = False
            return [*self._index.snapshots()]
        return taken
