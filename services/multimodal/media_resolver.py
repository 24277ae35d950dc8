"""Puts the embeddings of media into prompts: those in the request, and those that encode workers hold."""

import dataclasses
from collections.abc import Sequence

from baton.errors import FieldViolation, InvalidRequest
from runtime.aio import gather_or_cancel
from runtime.clock import perf_counter
from services.engines.base import ModelFacts
from services.engines.prompt import Embedding, MediaSpan, Prompt
from services.handoff.remote_handoff import LeasedBlocks
from services.multimodal.embedding_pull import EmbeddingPuller
from services.multimodal.media_spans import GivenEmbedding, GivenSpan, check_spans
from services.telemetry.timings import CallClock, Timing, concurrent


class MediaResolver:
    """Puts embeddings into prompts; leased ones are pulled, all of a prompt at the same time."""

    def __init__(self, facts: ModelFacts, puller: EmbeddingPuller) -> None:
        self.facts = facts
        self._puller = puller

    async def with_embeddings(self, prompt: Prompt, spans: Sequence[GivenSpan], clock: CallClock) -> Prompt:
        """Returns the prompt with every embedding, and adds the time of the pulls to `clock`.

        Raises InvalidRequest naming each wrong or missing field, Unsupported for a model without images, and what
        EmbeddingPuller.pull raises; the first failure cancels the other pulls.
        """
        check_spans(self.facts, prompt, spans)
        missing = [
            FieldViolation(f"prompt.media[{index}].embedding", "is missing, and the request has no handoff")
            for index, span in enumerate(spans)
            if span.embedding is None
        ]
        if missing:
            raise InvalidRequest(missing)
        return dataclasses.replace(prompt, media=tuple(await self._pull(spans, clock)))

    def with_inline_embeddings(self, prompt: Prompt, spans: Sequence[GivenSpan]) -> Prompt:
        """Returns the prompt with the embeddings that the request contains; its KV comes by a handoff."""
        check_spans(self.facts, prompt, spans)
        return dataclasses.replace(prompt, media=tuple(_span(span, _inline(span.embedding)) for span in spans))

    async def _pull(self, spans: Sequence[GivenSpan], clock: CallClock) -> list[MediaSpan]:
        started = perf_counter()
        pulled = await gather_or_cancel(self._with_embedding(index, span) for index, span in enumerate(spans))
        timings = [timing for _, timing in pulled if timing is not None]
        if timings:
            # One stage, however many pulls ran at the same time: the stages of a call do not overlap.
            clock.add([concurrent(timings, perf_counter() - started)])
        return [span for span, _ in pulled]

    async def _with_embedding(self, index: int, span: GivenSpan) -> tuple[MediaSpan, Timing | None]:
        given = span.embedding
        assert given is not None
        if isinstance(given.source, LeasedBlocks):
            pulled = await self._puller.pull(given, given.source, f"prompt.media[{index}].embedding.lease")
            return _span(span, _embedding(given, pulled.data)), pulled.timing
        return _span(span, _inline(given)), None


def _span(span: GivenSpan, embedding: Embedding | None) -> MediaSpan:
    return MediaSpan(span.start, span.num_tokens, span.digest, embedding)


def _inline(given: GivenEmbedding | None) -> Embedding | None:
    return _embedding(given, given.source) if given is not None and isinstance(given.source, bytes) else None


def _embedding(given: GivenEmbedding, data: bytes) -> Embedding:
    rows, width = given.shape
    return Embedding(given.digest, (rows, width), given.dtype, data)
