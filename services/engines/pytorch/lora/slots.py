"""The embedded engine's places for adapters: rows of its stacked matrices, which its thread fills between two steps."""

from baton.errors import ConfigError, DeviceFailed, Overloaded
from services.engines.lora.catalog import CatalogEntry
from services.engines.lora.peft_folder import LowRank, read_adapter
from services.engines.pytorch.engine_loop import EngineLoop
from services.engines.pytorch.failures import failure_of, is_out_of_memory
from services.engines.pytorch.lora.layers import LoraLayers

_RETRY_SECONDS = 1.0


class EmbeddedLoraSlots:
    """LoraSlots of one engine. Their memory was taken when it started."""

    def __init__(self, loop: EngineLoop, layers: LoraLayers, max_rank: int) -> None:
        self._loop = loop
        self._layers = layers
        self._max_rank = max_rank

    def read(self, entry: CatalogEntry) -> dict[str, LowRank]:
        return self._layers.placed(read_adapter(entry.folder, self._max_rank, entry.ranked.lora.digest))

    async def install(self, slot: int, weights: dict[str, LowRank]) -> None:
        await self._loop.call(lambda _core: self._install(slot, weights))

    async def clear(self, slot: int) -> None:
        """No-op: the next adapter replaces the content."""

    def _install(self, slot: int, weights: dict[str, LowRank]) -> None:
        """Fails the load alone, since no sequence uses a slot that is half written. A lost device ends the engine."""
        try:
            self._layers.install(slot, weights)
        except RuntimeError as error:
            if is_out_of_memory(error):
                text = "there is too little memory to load an adapter"
                raise Overloaded(text, retry_after_seconds=_RETRY_SECONDS) from error
            if isinstance(failure_of("engine", error), DeviceFailed):
                raise
            raise ConfigError(f"the adapter cannot be copied to the device: {error}") from error
