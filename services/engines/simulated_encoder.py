"""The simulated engine's eyes: embeddings that follow from the content, and cost what the configuration says."""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from typing_extensions import Self

from rpc.errors import ConfigError, Overloaded
from services.engine import EncoderLoad, ModelFacts
from services.engines.simulated_config import SimulatedConfig
from services.engines.simulated_facts import kv_layout, model_facts
from services.engines.simulated_images import content_digest, embedding_data
from services.engines.simulated_tokens import Vocabulary, vocabulary_of
from services.prompt import Embedding, Media


class SimulatedEncoder:
    """An Encoder without a model. Images are encoded one after the other, in the order in which they came."""

    def __init__(self, config: SimulatedConfig) -> None:
        if not config.image_tokens:
            raise ConfigError("engine.image_tokens: is 0, so that the simulated model has no images to encode")
        self._config = config
        self._turn = asyncio.Lock()
        self._unfinished = 0

    async def __aenter__(self) -> Self:
        started = time.monotonic()
        vocabulary = vocabulary_of(self._config)
        await asyncio.sleep(self._config.load_seconds)
        self._facts = _facts(self._config, vocabulary, time.monotonic() - started)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to free."""

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def healthy(self) -> bool:
        return True

    def load(self) -> EncoderLoad:
        """Images that are being encoded, one at most, and that wait."""
        running = int(self._turn.locked())
        return EncoderLoad(running, max(0, self._unfinished - running))

    async def encode(self, media: Sequence[Media]) -> list[Embedding]:
        """One embedding for each image. See EncodeEngine."""
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


def _facts(config: SimulatedConfig, vocabulary: Vocabulary, load_seconds: float) -> ModelFacts:
    facts = model_facts(config, vocabulary, kv_layout(config, vocabulary), load_seconds)
    assert facts.images is not None
    fingerprint = hashlib.sha256(f"simulated {config.image_tokens} {config.image_hidden_size}".encode()).hexdigest()
    images = replace(facts.images, encoder_fingerprint=fingerprint)
    return replace(facts, layout=images.embedding_layout, images=images)
