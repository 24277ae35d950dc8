"""Passes the prefix cache's events from the engine's thread to readers in the event loop."""

from functools import partial

from services.engines.kv_events import KvPublisher
from services.engines.pytorch.engine_loop import EngineLoop
from services.engines.pytorch.kv_cache.blocks import BlockRemoved, BlockStored, CacheListener


class CacheEvents:
    """A CacheListener that publishes the changes of a step together with its other outcomes.

    Events before `loop` is set are dropped: the warm-up leaves nothing in the cache.
    """

    def __init__(self, publisher: KvPublisher, listener: CacheListener | None) -> None:
        self._publisher = publisher
        self._listener = listener
        self.loop: EngineLoop | None = None

    def __call__(self, event: BlockStored | BlockRemoved) -> None:
        """Call it on the engine's thread."""
        if self._listener is not None:
            self._listener(event)
        if self.loop is not None:
            publish = self._publisher.stored if isinstance(event, BlockStored) else self._publisher.removed
            self.loop.notify(partial(publish, event.block_hash))
