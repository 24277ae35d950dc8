"""The embedded engine's places for adapters: rows of its stacked matrices, which its thread fills between two steps."""

from services.engines.lora.catalog import CatalogEntry
from services.engines.lora.peft_folder import LowRank, read_adapter
from services.engines.pytorch.engine_loop import EngineLoop
from services.engines.pytorch.lora.layers import LoraLayers


class EmbeddedLoraSlots:
    """LoraSlots of one engine. Their memory was taken when it started."""

    def __init__(self, loop: EngineLoop, layers: LoraLayers, max_rank: int) -> None:
        self._loop = loop
        self._layers = layers
        self._max_rank = max_rank

    def read(self, entry: CatalogEntry) -> dict[str, LowRank]:
        return self._layers.placed(read_adapter(entry.folder, self._max_rank, entry.ranked.lora.digest))

    async def install(self, slot: int, weights: dict[str, LowRank]) -> None:
        await self._loop.call(lambda _core: self._layers.install(slot, weights))

    async def clear(self, slot: int) -> None:
        """No-op: the next adapter replaces the content."""
