"""Loads the media of requests, and makes prompts with them."""

import asyncio
from collections.abc import Sequence

from baton.engine.v1 import prompt_pb2
from media.content import MediaItem
from media.loader import MediaLoader
from router.context import RequestContext
from router.multimodal.encode import Embedder, LoadedMedia
from router.multimodal.prompt import AdoptedPrompt, MultimodalPrompt
from router.text.served_model import ServedModel
from runtime.aio import gather_or_cancel


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
