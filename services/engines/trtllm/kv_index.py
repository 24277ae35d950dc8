"""What TensorRT-LLM's prefix cache holds, by its events and our hash chain: the one that routers know of other engines.

Its own hashes say nothing outside of it. An event that was lost can be had no more: then what is known is forgotten,
for a block that is wrongly thought to be there costs more than one that is not known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.engines.pytorch.prefix import block_hash, root_hash
from services.kv_events import KvChange, KvRemoved, KvSnapshot, KvStored

_UNSIGNED = 2**64 - 1


@dataclass(slots=True)
class _Rank:
    """One attention-DP rank's cache. `ours` is by its hash; `unknown` are blocks that have none of ours."""

    last_event: int | None = None
    ours: dict[int, bytes] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)


class KvIndex:
    """Fed with events in their order; says what has changed for others."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ranks: dict[int, _Rank] = {}
        self._window = 0
        self.gaps = 0

    def snapshots(self) -> list[KvSnapshot]:
        """All that is known now, one for each rank; one at least."""
        ranks = self._ranks or {0: _Rank()}
        return [KvSnapshot(number, tuple(rank.ours.values())) for number, rank in sorted(ranks.items())]

    def feed(self, event: Mapping[str, Any]) -> list[KvChange]:
        """What an event means: nothing, in most cases of those that are not of whole blocks of text."""
        number = int(event.get("attention_dp_rank") or 0)
        rank = self._ranks.setdefault(number, _Rank())
        changes: list[KvChange] = self._gap(number, rank, int(event["event_id"]))
        changes += self._widen(event.get("window_size"))
        if event.get("window_size") not in (None, self._window):
            # Of a sliding window: its blocks hold a part of what a prompt needs.
            return changes
        content = event["data"]
        match content["type"]:
            case "stored":
                return changes + self._stored(number, rank, content)
            case "removed":
                return changes + self._removed(number, rank, content["block_hashes"])
            case _:
                return changes

    def _gap(self, number: int, rank: _Rank, event_id: int) -> list[KvChange]:
        expected = event_id if rank.last_event is None else rank.last_event + 1
        rank.last_event = event_id
        if event_id == expected:
            return []
        self.gaps += 1
        rank.ours.clear()
        rank.unknown.clear()
        return [KvSnapshot(number, ())]

    def _widen(self, window: int | None) -> list[KvChange]:
        """The widest window is the whole context; what was taken for it before was not."""
        if window is None or window <= self._window:
            return []
        known = [number for number, rank in self._ranks.items() if rank.ours]
        self._window = window
        for rank in self._ranks.values():
            rank.ours.clear()
        return [KvSnapshot(number, ()) for number in known]

    def _stored(self, number: int, rank: _Rank, content: Mapping[str, Any]) -> list[KvChange]:
        parent = content["parent_hash"]
        previous = None if parent is None else rank.ours.get(parent & _UNSIGNED)
        is_known = parent is None or previous is not None
        new: list[bytes] = []
        for block in content["blocks"]:
            theirs = block["block_hash"] & _UNSIGNED
            tokens = [token["token_id"] for token in block["tokens"]]
            if not (is_known and self._is_whole_text(tokens, block)):
                # Remembered, so that its end is known to concern nobody.
                is_known = False
                rank.unknown.add(theirs)
                continue
            previous = block_hash(previous or root_hash(block.get("cache_salt") or ""), tokens)
            if rank.ours.get(theirs) != previous:
                rank.ours[theirs] = previous
                new.append(previous)
        return [KvStored(number, tuple(new))] if new else []

    def _is_whole_text(self, tokens: Sequence[object], block: Mapping[str, Any]) -> bool:
        """Not the partial last block, and none with an image: there, ids may be digests, as text."""
        whole = len(tokens) == self._block_tokens and not block.get("mm_keys")
        return whole and all(isinstance(token, int) for token in tokens)

    def _removed(self, number: int, rank: _Rank, hashes: Sequence[int]) -> list[KvChange]:
        gone = []
        for theirs in (each & _UNSIGNED for each in hashes):
            if theirs in rank.unknown:
                rank.unknown.discard(theirs)
            elif (ours := rank.ours.pop(theirs, None)) is not None:
                gone.append(ours)
        return [KvRemoved(number, tuple(gone))] if gone else []
