"""Gives prompts their media: loads what requests bring, and has it encoded."""

import asyncio
from collections.abc import Sequence

from baton.engine.v1 import prompt_pb2

from media.item import MediaItem
from media.loader import MediaLoader
from router.deadline import Deadline
from router.embedder import Embedder, LoadedMedia, Order
from router.encoders import Encoder
from router.illustrated_prompt import IllustratedPrompt
from router.model import ServedModel
from router.requests import RunningRequest
from router.together import together


class Illustrator:
    """Loads at most `max_loading` media at a time, of all requests."""

    def __init__(self, loader: MediaLoader, embedder: Embedder, max_loading: int) -> None:
        self._loader = loader
        self._embedder = embedder
        self._room = asyncio.Semaphore(max_loading)

    async def load(self, items: Sequence[MediaItem]) -> list[LoadedMedia]:
        """Fetches and checks media. Raises what MediaLoader.load raises, naming the field that is wrong."""
        return await together(self._load(item) for item in items)

    def prompt(
        self,
        prompt: prompt_pb2.Prompt,
        media: Sequence[LoadedMedia],
        model: ServedModel,
        running: RunningRequest,
        deadline: Deadline,
    ) -> IllustratedPrompt:
        """A prompt with these media, one for each placeholder in it. Raises NoWorker if nothing encodes."""
        encoder = self._embedder.choose_encoder(model.name) if media else Encoder(model.name, "", "")
        placeholder = model.images.placeholder_token_id if model.images else 0
        order = Order(running, prompt.cache_salt, encoder, deadline)
        return IllustratedPrompt(prompt, placeholder, media, order, self._embedder)

    async def _load(self, item: MediaItem) -> LoadedMedia:
        async with self._room:
            return LoadedMedia(item.path, await self._loader.load(item))
