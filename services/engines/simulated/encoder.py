"""The simulated encoder and embedder: embeddings that follow from an image's bytes or a text's ids, at the configured
cost.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy
from typing_extensions import Self

from baton.errors import ConfigError, EmbeddingLost, Overloaded
from runtime.clock import monotonic
from services.engines.base import EncoderLoad, EnginePart, ModelFacts, Vector
from services.engines.prompt import Embedding, Media, MediaSpan
from services.engines.rules import EmbeddingRules
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.tokens import Vocabulary, kv_layout, model_facts, vocabulary_of


class SimulatedPart(EnginePart):
    """A part without a model, which computes one thing after the other, in the order of arrival."""

    def __init__(self, config: SimulatedConfig) -> None:
        self._config = config
        self._turn = asyncio.Lock()
        self._unfinished = 0

    def _new_facts(self, vocabulary: Vocabulary, load_seconds: float) -> ModelFacts:
        layout = kv_layout(self._config, vocabulary)
        return model_facts(self._config, vocabulary, layout, load_seconds)

    async def __aenter__(self) -> Self:
        started = monotonic()
        vocabulary = vocabulary_of(self._config)
        await asyncio.sleep(self._config.load_seconds)
        self._facts = self._new_facts(vocabulary, monotonic() - started)
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Frees nothing."""

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def healthy(self) -> bool:
        return True

    @property
    def responsive(self) -> bool:
        return True

    def load(self) -> EncoderLoad:
        """Returns what is being computed, at most one, and what waits."""
        running = int(self._turn.locked())
        return EncoderLoad(running, max(0, self._unfinished - running))


class SimulatedEncoder(SimulatedPart):
    """An Encoder without a model."""

    def __init__(self, config: SimulatedConfig) -> None:
        if not config.image_tokens:
            raise ConfigError("engine.image_tokens: is 0, so that the simulated model has no images to encode")
        super().__init__(config)

    def _new_facts(self, vocabulary: Vocabulary, load_seconds: float) -> ModelFacts:
        config, facts = self._config, super()._new_facts(vocabulary, load_seconds)
        assert facts.images is not None
        text = f"simulated {config.image_tokens} {config.image_hidden_size}"
        images = replace(facts.images, encoder_fingerprint=hashlib.sha256(text.encode()).hexdigest())
        return replace(facts, layout=images.embedding_layout, images=images, data_parallel_ranks=1)

    async def encode(self, media: Sequence[Media]) -> list[Embedding]:
        """Returns one embedding for each image. See EncodeEngine."""
        if self._unfinished and self._unfinished + len(media) > self._config.max_waiting:
            raise Overloaded(f"{self._unfinished} images wait already", retry_after_seconds=1.0)
        self._unfinished += len(media)
        try:
            return [await self._encode(one) for one in media]
        finally:
            self._unfinished -= len(media)

    async def _encode(self, media: Media) -> Embedding:
        async with self._turn:
            await asyncio.sleep(self._config.encode_seconds)
        digest = content_digest(media.content)
        shape = (self._config.image_tokens, self._config.image_hidden_size)
        return Embedding(digest, shape, "float32", embedding_data(digest, shape))


class SimulatedEmbedder(SimulatedPart):
    """A TextEmbedder without a model."""

    def _new_facts(self, vocabulary: Vocabulary, load_seconds: float) -> ModelFacts:
        config = self._config
        rules = EmbeddingRules(config.embed_dimensions, config.context_tokens, "last", normalize=True)
        return replace(super()._new_facts(vocabulary, load_seconds), embedding=rules)

    async def embed(self, inputs: Sequence[Sequence[int]]) -> list[Vector]:
        """Returns a vector for each input. See TextEmbedder."""
        if self._unfinished >= self._config.max_waiting:
            raise Overloaded(f"{self._unfinished} calls wait already", retry_after_seconds=1.0)
        self._unfinished += 1
        try:
            async with self._turn:
                await asyncio.sleep(self._config.embed_seconds)
            return [_vector(one, self._config.embed_dimensions) for one in inputs]
        finally:
            self._unfinished -= 1


def _vector(ids: Sequence[int], dimensions: int) -> Vector:
    seed = hashlib.sha256(repr(list(ids)).encode()).digest()
    drawn = numpy.random.default_rng(int.from_bytes(seed[:8], "little")).standard_normal(dimensions)
    return drawn.astype(numpy.float32)


def content_digest(content: bytes) -> bytes:
    """Returns the digest of an image's embedding."""
    return hashlib.sha256(b"simulated image" + content).digest()


def embedding_data(digest: bytes, shape: tuple[int, int]) -> bytes:
    """Returns the content of the embedding with this digest, in float32."""
    size = shape[0] * shape[1] * 4
    return (digest * (size // len(digest) + 1))[:size]


def check_embeddings(media: Iterable[MediaSpan]) -> None:
    """Raises EmbeddingLost if an embedding does not belong to its digest: another worker may make the right one."""
    for span in media:
        embedding = span.embedding
        if embedding is not None and embedding.data != embedding_data(span.digest, embedding.shape):
            raise EmbeddingLost(f"the embedding at token {span.start} does not belong to its digest")
