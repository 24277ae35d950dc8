"""A prompt and its media: placeholders, embeddings, and the messages for workers with and without embeddings.

Loads the media of requests, and makes prompts with them.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import Self

from baton.engine.v1 import prompt_pb2
from baton.errors import EmbeddingLost, EngineFailed
from baton.inference.v1 import generate_pb2, lora_pb2, timing_pb2
from media.content import MediaItem
from media.loader import MediaLoader
from router.context import RequestContext
from router.multimodal.cache import EmbeddingRef
from router.multimodal.encode import Embedder, LoadedMedia
from router.placement.encoders import EncoderVersion
from router.text.parsing.registry import AnswerParser
from router.text.served_model import ServedModel
from router.workers.serialized_prompt import SerializedPrompt
from runtime.aio import gather_or_cancel


@dataclass(frozen=True, slots=True)
class Expanded:
    """The ids with all placeholders, and the position of the first one of each media item."""

    token_ids: tuple[int, ...]
    starts: tuple[int, ...]


def expand(token_ids: Sequence[int], placeholder: int, lengths: Sequence[int]) -> Expanded:
    """Repeats each placeholder as often as its embedding has rows. There is one placeholder for each length."""
    ids = list(token_ids[:])
    expanded: list[int] = []
    starts: list[int] = []
    position = 0
    for length in lengths:
        place = ids.index(placeholder, position)
        expanded += ids[position:place]
        starts.append(len(expanded))
        expanded += [placeholder] * length
        position = place + 1
    return Expanded((*expanded, *ids[position:]), tuple(starts))


class MultimodalPrompt:
    """A prompt that holds its embeddings from `embed` until `release` or `invalidate`, and encodes again if needed.

    A context manager: leaving it releases the embeddings. Without media all of that does nothing.
    """

    def __init__(
        self,
        ctx: RequestContext,
        model: ServedModel,
        prompt: prompt_pb2.Prompt,
        media: Sequence[LoadedMedia],
        embedder: Embedder,
    ) -> None:
        self.model = model.name
        self._ctx = ctx
        self._original = self._prompt = prompt
        # The ids of the prompt as it is now, for those who read them all; empty if only the message has them.
        self.token_ids: Sequence[int] = ()
        # The ids of the request's bad words.
        self.bad_sequences: Sequence[Sequence[int]] = ()
        # The prompt as it is sent, of a long one without media.
        self.serialized: SerializedPrompt | None = None
        self._placeholder = model.images.placeholder_token_id if model.images else 0
        self._media = media
        self._embedder = embedder
        self._encoder = embedder.choose_encoder(model.name) if media else EncoderVersion(model.name, "", "")
        self._embeddings: dict[int, EmbeddingRef] = {}
        self._avoided: frozenset[str] = frozenset()  # the processes of workers whose embeddings could not be read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def for_answer(self, ctx: RequestContext, model: ServedModel) -> "MultimodalPrompt":
        """The same prompt for another answer, which holds its own embeddings."""
        prompt = MultimodalPrompt(ctx, model, self._original, self._media, self._embedder)
        if self._prompt is self._original:
            prompt.token_ids, prompt.serialized = self.token_ids, self.serialized
        prompt.bad_sequences = self.bad_sequences
        return prompt

    def answer_parser(self, model: ServedModel) -> AnswerParser | None:
        """The parser of reasoning and tool calls for an answer to this prompt; None for plain text."""
        return model.answer_parser(self._ctx.request, self._original.token_ids, self._ctx.call_id)

    @property
    def num_tokens(self) -> int:
        """The length of the prompt. Final after the first `embed`."""
        return len(self._prompt.token_ids)

    @property
    def without_embeddings(self) -> prompt_pb2.Prompt:
        """The prompt for a worker that gets its KV: the ids and the spans of the media."""
        return self._prompt

    async def with_embeddings(self) -> prompt_pb2.Prompt:
        """The prompt for a worker that computes it, with embeddings that can be read from now on."""
        if not self._media:
            return self._prompt
        await self.embed()
        whole = prompt_pb2.Prompt()
        whole.CopyFrom(self._prompt)
        for index, span in enumerate(whole.media):
            span.embedding.CopyFrom(self._embeddings[index].message())
        return whole

    @property
    def embedding_layout(self) -> str:
        """The embedding layout that a worker must support; empty without media."""
        return self._encoder.layout if self._media else ""

    async def embed(self) -> None:
        """Gets the missing embeddings, and notes them in the request's stats."""
        if not self._media or len(self._embeddings) == len(self._media):
            return
        missing = [index for index in range(len(self._media)) if index not in self._embeddings]
        with self._ctx.stats.timings.measure_call(timing_pb2.STAGE_ENCODE) as timing:
            await gather_or_cancel(self._embed(index) for index in missing)
            # Media are encoded in parallel: the last one determined the duration.
            encoded = [ref.worker_id for ref in reversed(self._embeddings.values()) if not ref.was_cached]
            timing.worker_id = encoded[0] if encoded else ""
        self._record([self._embeddings[index] for index in missing])
        self._place([self._embeddings[index] for index in range(len(self._media))])

    def release(self) -> None:
        """Gives up the embeddings; a later use gets them again."""
        if not self._embeddings:
            return
        for ref in self._embeddings.values():
            ref.close()
        self._embeddings.clear()

    def invalidate(self, *, has_tokens: bool = False) -> None:
        """Releases the embeddings, and removes them from the cache: a worker could not read one of them.

        Rather other workers encode them again. Unless the answer has begun they may differ from the first ones.
        """
        for ref in self._embeddings.values():
            ref.invalidate()
            self._avoided |= {ref.encoded.worker.record.process}
        self.release()
        if not has_tokens:
            self._prompt = self._original

    async def _embed(self, index: int) -> None:
        media = self._media[index]
        self._embeddings[index] = await self._embedder.embed(self._ctx, media, self._encoder, self._avoided)

    def _record(self, refs: Sequence[EmbeddingRef]) -> None:
        stats = self._ctx.stats
        if not stats.media_tokens:
            stats.media_tokens = sum(ref.num_tokens for ref in refs)
            stats.cached_embeddings = sum(ref.was_cached for ref in refs)
            stats.encoding = _encoding(refs)
        stats.add_encode_workers([ref.worker_id for ref in refs if not ref.was_cached])

    def _place(self, refs: Sequence[EmbeddingRef]) -> None:
        """Expands the placeholders. When encoded again, media must keep their places."""
        digests = [ref.encoded.embedding.digest for ref in refs]
        if self._prompt.media:
            if digests != [span.digest for span in self._prompt.media]:
                raise EngineFailed("encoding the same media again gave a different embedding", stage="encode")
            return
        expanded = expand(self._prompt.token_ids, self._placeholder, [ref.num_tokens for ref in refs])
        spans = [
            prompt_pb2.MediaSpan(start=start, num_tokens=ref.num_tokens, digest=digest)
            for start, ref, digest in zip(expanded.starts, refs, digests, strict=True)
        ]
        self.token_ids, self.serialized = expanded.token_ids, None
        self._prompt = prompt_pb2.Prompt(
            token_ids=expanded.token_ids, cache_salt=self._prompt.cache_salt, media=spans, lora=_lora(self._prompt)
        )
        if self._original.HasField("cache"):
            self._prompt.cache.CopyFrom(self._original.cache)
            retained = self._original.token_ids[: self._original.cache.retain_tokens].count(self._placeholder)
            self._prompt.cache.retain_tokens += sum(ref.num_tokens - 1 for ref in refs[:retained])


class AdoptedPrompt(MultimodalPrompt):
    """The prompt of an answer that was taken over. Its media are not here: with any it cannot be computed again."""

    async def with_embeddings(self) -> prompt_pb2.Prompt:
        """The prompt for a worker, as of MultimodalPrompt. Raises EmbeddingLost for a prompt with media."""
        if self.without_embeddings.media:
            raise EmbeddingLost("an answer that was taken over has no embeddings: resume it with its request")
        return self.without_embeddings


def _lora(prompt: prompt_pb2.Prompt) -> lora_pb2.LoraAdapter | None:
    return prompt.lora if prompt.HasField("lora") else None


def _encoding(refs: Sequence[EmbeddingRef]) -> generate_pb2.Encoding.ValueType:
    """The way in which the media of a request were encoded: from the cache, by an encode worker, or inline."""
    workers = [ref.encoded.worker for ref in refs if not ref.was_cached]
    if not workers:
        return generate_pb2.ENCODING_CACHED
    is_inline = any(len(worker.record.roles) > 1 for worker in workers)
    return generate_pb2.ENCODING_INLINE if is_inline else generate_pb2.ENCODING_WORKER


class MultimodalProcessor:
    """Loads at most `max_loading` media items at a time, of all requests together."""

    def __init__(self, loader: MediaLoader, embedder: Embedder, max_loading: int) -> None:
        self._loader = loader
        self._embedder = embedder
        self._loading = asyncio.Semaphore(max_loading)

    async def load(self, items: Sequence[MediaItem]) -> list[LoadedMedia]:
        """Fetches and checks media. Raises the errors of MediaLoader.load, which name the wrong field."""
        return await gather_or_cancel(self._load(item) for item in items)

    def prompt(
        self, ctx: RequestContext, model: ServedModel, prompt: prompt_pb2.Prompt, media: Sequence[LoadedMedia]
    ) -> MultimodalPrompt:
        """A prompt with one media item for each placeholder in it. Raises NoWorker if no encoder is known."""
        return MultimodalPrompt(ctx, model, prompt, media, self._embedder)

    def adopted(self, ctx: RequestContext, model: ServedModel, prompt: prompt_pb2.Prompt) -> AdoptedPrompt:
        """The prompt of an answer that a worker runs already, for another router until now."""
        return AdoptedPrompt(ctx, model, prompt, (), self._embedder)

    async def _load(self, item: MediaItem) -> LoadedMedia:
        async with self._loading:
            return LoadedMedia(item.path, await self._loader.load(item))
