"""The skeleton of an engine of another package that transfers KV itself: its state, its events and its end."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from baton.errors import EngineFailed, HandoffLost, Unsupported
from runtime.aio import timeout
from services.engines.answer import Finished, Tokens
from services.engines.base import Engine, ModelFacts
from services.engines.external.held_kv import HeldHandoffs
from services.engines.external.requests import ExternalGeneration, ExternalRequests
from services.engines.kv import PulledKv
from services.engines.kv_transfer import RemoteKv
from services.engines.prompt import Prompt, Sampling
from services.engines.running.canary import Canary
from services.engines.running.generation import Generation
from services.engines.running.request_context import current_freed_kv

CANARY_SALT = "baton-canary"
Loaded = TypeVar("Loaded")


class ExternalEngine(Engine):
    """An Engine whose entering sets `_llm`, `_facts`, `_requests`, `_held`, `_canary`, and what `_open` closes.

    A subclass has `_title`, its name for people; `_whole`, which runs a request from its prompt; `_warm_up`, which
    runs one token of it; and `_quiet_seconds`, the time without progress.
    """

    _title: str
    _llm: Any
    _facts: ModelFacts
    _requests: ExternalRequests[Any]
    _held: HeldHandoffs
    _canary: Canary
    _open: AsyncExitStack

    async def __aexit__(self, *exception: object) -> None:
        if self.healthy:
            await self._held.outlived(self.fetch_seconds)
        await self._open.aclose()

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def llm(self) -> Any:
        """The package's own engine. Raises NotOpened before it is loaded."""
        return self._llm

    @property
    def kv_transfer(self) -> "ExternalEngine":
        return self

    @property
    def responsive(self) -> bool:
        """False also while a test request takes far longer than usual."""
        return self.healthy and not self._canary.is_late

    @property
    def fetch_seconds(self) -> float:
        raise NotImplementedError

    def decode(self, source: Prompt | PulledKv, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        """Generates to the end (DecodeEngine)."""
        if isinstance(source, PulledKv):
            raise Unsupported(f"the {self._facts.engine} engine decodes no pulled blocks: it fetches KV itself")
        return self._whole(source, sampling)

    async def decode_remote(self, source: RemoteKv, sampling: Sampling) -> Generation:
        """Fetches the KV, and generates from it (TransfersKv)."""
        raise NotImplementedError

    def _whole(self, prompt: Prompt, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        raise NotImplementedError

    async def _warm_up(self) -> None:
        raise NotImplementedError

    def _quiet_seconds(self) -> float:
        raise NotImplementedError

    async def _loaded(self, loading: Awaitable[Loaded], seconds: float) -> Loaded:
        """Returns the result of `loading`. Raises EngineFailed if it takes longer than `seconds`."""
        try:
            async with timeout(seconds):
                return await loading
        except TimeoutError as error:
            raise EngineFailed(f"{self._title} has not started within {seconds} s") from error

    async def _arrived(self, coming: Awaitable[None], seconds: float) -> None:
        """Waits for KV of another engine. Raises HandoffLost if it does not come, within `seconds`."""
        try:
            async with timeout(seconds):
                await coming
        except TimeoutError as error:
            raise HandoffLost(f"the KV did not arrive within {seconds} s") from error
        except EngineFailed as error:
            if self._requests.failure is not None:
                raise
            raise HandoffLost(f"the KV did not arrive: {error.message}") from error

    async def _open_canary(self, stack: AsyncExitStack, seconds: float | None, patience: float) -> None:
        canary = Canary(self._warm_up, self._quiet_seconds, seconds, patience)
        self._canary = await stack.enter_async_context(canary)

    async def _events(
        self, generation: ExternalGeneration, finish: Callable[[], Finished]
    ) -> AsyncGenerator[Tokens | Finished, None]:
        """Yields what a generation has, as it comes, and at its end what `finish` makes of it."""
        while True:
            await generation.changed.wait()
            generation.changed.clear()
            if generation.error is not None:
                raise generation.error
            has_ended = generation.has_ended
            if tokens := generation.pull():
                yield tokens
            if has_ended:
                yield finish()
                return

    def _give_back(self, generation: ExternalGeneration) -> None:
        """Counts the KV of a generation that is dropped as freed for the request."""
        blocks = -(-generation.num_tokens // self._facts.layout.block_tokens)
        current_freed_kv().give_back(generation.num_tokens, blocks)
