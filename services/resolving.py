"""A prompt with its media: embeddings that were sent along, or that lie with an encode worker."""

import dataclasses
from collections.abc import Sequence

from rpc.errors import FieldViolation, InvalidRequest
from services.clock import CallClock
from services.embedding_pull import EmbeddingPuller
from services.engine import ModelFacts
from services.handoffs import LeasedBlocks
from services.prompt import Embedding, MediaSpan, Prompt
from services.spans import GivenEmbedding, GivenSpan, check_spans


class MediaResolver:
    """Puts media into prompts, pulling what is leased."""

    def __init__(self, facts: ModelFacts, puller: EmbeddingPuller) -> None:
        self._facts = facts
        self._puller = puller

    async def computable(self, prompt: Prompt, spans: Sequence[GivenSpan], clock: CallClock) -> Prompt:
        """The prompt with every embedding; `clock` is told what pulling took.

        Raises InvalidRequest naming what is wrong or missing, Unsupported, and what EmbeddingPuller.pull raises.
        """
        check_spans(self._facts, prompt, spans)
        missing = [
            FieldViolation(f"prompt.media[{index}].embedding", "is missing, and no KV comes by a handoff")
            for index, span in enumerate(spans)
            if span.embedding is None
        ]
        if missing:
            raise InvalidRequest(missing)
        media = [await self._with_embedding(index, span, clock) for index, span in enumerate(spans)]
        return dataclasses.replace(prompt, media=tuple(media))

    def described(self, prompt: Prompt, spans: Sequence[GivenSpan]) -> Prompt:
        """The prompt with those embeddings that were sent along: its KV comes by a handoff."""
        check_spans(self._facts, prompt, spans)
        return dataclasses.replace(prompt, media=tuple(_span(span, _inline(span.embedding)) for span in spans))

    async def _with_embedding(self, index: int, span: GivenSpan, clock: CallClock) -> MediaSpan:
        given = span.embedding
        assert given is not None
        if isinstance(given.source, LeasedBlocks):
            pulled = await self._puller.pull(given, given.source, f"prompt.media[{index}].embedding.lease")
            clock.add([pulled.timing])
            return _span(span, _embedding(given, pulled.data))
        return _span(span, _inline(given))


def _span(span: GivenSpan, embedding: Embedding | None) -> MediaSpan:
    return MediaSpan(span.start, span.num_tokens, span.digest, embedding)


def _inline(given: GivenEmbedding | None) -> Embedding | None:
    return _embedding(given, given.source) if given is not None and isinstance(given.source, bytes) else None


def _embedding(given: GivenEmbedding, data: bytes) -> Embedding:
    rows, width = given.shape
    return Embedding(given.digest, (rows, width), given.dtype, data)
