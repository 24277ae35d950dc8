"""Events of the prefix cache: blocks that it contains, has lost, or has in a tier below the pool."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from services.engines.kv_events import KvPublisher, KvTier


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Notes that the prefix cache now contains the block with this hash."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Notes that the prefix cache has lost the block with this hash."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class BlockMoved:
    """Notes that the block with this hash is now in a tier below the pool."""

    block_hash: bytes
    tier: KvTier


CacheListener = Callable[[BlockStored | BlockRemoved | BlockMoved], None]


class CacheEvents:
    """Publishes the changes of the prefix cache in a step together with the step's other outcomes.

    Changes before `notify` is set are dropped: the warm-up leaves nothing in the cache.
    """

    def __init__(self, publisher: KvPublisher) -> None:
        self._publisher = publisher
        self.notify: Callable[[Callable[[], None]], None] | None = None

    def __call__(self, event: BlockStored | BlockRemoved | BlockMoved) -> None:
        """Call it on the engine's thread."""
        if self.notify is None:
            return
        match event:
            case BlockStored(block_hash):
                self.notify(partial(self._publisher.stored, block_hash))
            case BlockMoved(block_hash, tier):
                self.notify(partial(self._publisher.stored, block_hash, tier=tier))
            case BlockRemoved(block_hash):
                self.notify(partial(self._publisher.removed, block_hash))
