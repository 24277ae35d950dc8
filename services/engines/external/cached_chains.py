"""The contents of another package's prefix cache, by the hash chain that routers know from other engines.

The package's own hashes mean nothing outside it. Each stored block names its parent, so that our chain is built link by
link; a block whose chain does not begin at a known root is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine_protocol.prefix_hash import block_hash
from services.engines.kv_events import KvPublisher, KvTier


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Neighbouring blocks of one chain, by the package's hashes, with the tokens and the media of each.

    They follow `parent`; without one they begin a chain at `root`, which is None for a chain that is left out.
    """

    hashes: Sequence[int | bytes]
    parent: int | bytes | None
    root: bytes | None
    tokens: Sequence[Sequence[int]]
    media: Sequence[bytes]
    tier: KvTier = KvTier.DEVICE


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that left a tier."""

    hashes: Sequence[int | bytes]
    tier: KvTier = KvTier.DEVICE


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The cache is empty."""


BlockEvent = BlocksStored | BlocksRemoved | CacheCleared


class CachedChains:
    """Converts the events of one rank, in order, and tells the publisher."""

    def __init__(self, rank: int, publisher: KvPublisher) -> None:
        self._rank = rank
        self._publisher = publisher
        self._ours: dict[int | bytes, bytes] = {}
        self._blocks: dict[KvTier, set[int | bytes]] = {KvTier.DEVICE: set(), KvTier.HOST: set()}

    def __len__(self) -> int:
        return len(self._ours)

    def feed(self, event: BlockEvent) -> None:
        """Notes one event."""
        match event:
            case CacheCleared():
                self.forget()
            case BlocksStored():
                self._stored(event)
            case BlocksRemoved(hashes, tier):
                for theirs in hashes:
                    self._removed(theirs, tier)

    def forget(self) -> None:
        """Removes all blocks: events were lost, or the cache was cleared."""
        for tier in (KvTier.HOST, KvTier.DEVICE):
            for theirs in list(self._blocks[tier]):
                self._removed(theirs, tier)

    def _stored(self, event: BlocksStored) -> None:
        previous = event.root if event.parent is None else self._ours.get(event.parent)
        for theirs, tokens, media in zip(event.hashes, event.tokens, event.media, strict=True):
            if previous is None:
                return
            previous = block_hash(previous, tokens, media)
            self._ours[theirs] = previous
            self._blocks[event.tier].add(theirs)
            self._tell(theirs)

    def _removed(self, theirs: int | bytes, tier: KvTier) -> None:
        if theirs in self._blocks[tier]:
            self._blocks[tier].discard(theirs)
            self._tell(theirs)

    def _tell(self, theirs: int | bytes) -> None:
        """Publishes the fastest tier that has a block."""
        tier = next((tier for tier, blocks in self._blocks.items() if theirs in blocks), None)
        if tier is None:
            self._publisher.removed(self._ours.pop(theirs), self._rank)
        else:
            self._publisher.stored(self._ours[theirs], self._rank, tier)
