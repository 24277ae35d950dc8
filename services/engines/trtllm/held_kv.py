"""KV that TensorRT-LLM holds for other workers.

It is freed in two ways only: the other worker fetches it, or the transfer times out. An abort after the prompt has been
computed does nothing.
"""

from services.engines.external.held_kv import ExternalKv, ExternalPrefill, HeldHandoffs


class TrtllmKv(ExternalKv):
    """An EngineHeldKv. `release` frees nothing unless the other worker has fetched it; else the timeout does."""

    def __init__(self, prefilled: ExternalPrefill, held: HeldHandoffs) -> None:
        super().__init__(prefilled)
        self._held_handoffs = held

    async def release(self) -> int:
        """Frees KV that was fetched. Returns its number of blocks, 0 if the timeout will free it."""
        return self._held_handoffs.free(self) if self.is_fetched else 0
