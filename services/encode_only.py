"""What stands in a worker's engine's place where it only encodes: the model's facts and the embedding pool, no more."""

from collections.abc import AsyncGenerator

from rpc.errors import RoleMismatch
from services.answer import Finished, Tokens
from services.embedding_pool import EmbeddingPool
from services.engine import Encoder, EngineLoad, ModelFacts
from services.kv import BlockMemory, HeldKv, PulledKv, Reservation
from services.prompt import Prompt, Sampling


class EncodeOnly:
    """An Engine that refuses prompts. Its pool is the embeddings'."""

    def __init__(self, encoder: Encoder, pool: EmbeddingPool) -> None:
        self._encoder = encoder
        self._pool = pool

    @property
    def facts(self) -> ModelFacts:
        return self._encoder.facts

    @property
    def memory(self) -> BlockMemory:
        return self._pool.memory

    @property
    def healthy(self) -> bool:
        return self._encoder.healthy

    def load(self) -> EngineLoad:
        """Images that are encoded and that wait, and the blocks of the embedding pool."""
        load = self._encoder.load()
        return EngineLoad(load.running, load.waiting, 0, self._pool.total, self._pool.used, self._pool.used)

    async def prefill(self, prompt: Prompt, sampling: Sampling) -> HeldKv:
        """Refuses."""
        del prompt, sampling
        raise self._refusal()

    async def reserve(self, prompt: Prompt, num_tokens: int) -> Reservation:
        """Refuses."""
        del prompt, num_tokens
        raise self._refusal()

    def decode(self, source: Prompt | PulledKv, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        """Refuses."""
        del source, sampling
        raise self._refusal()

    def _refusal(self) -> RoleMismatch:
        return RoleMismatch("this worker has no language model: it only encodes")
