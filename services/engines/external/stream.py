"""An answer that an engine of another package is generating already, for its reader."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from services.engines.answer import Finished, Tokens
from services.engines.external.requests import ExternalGeneration
from services.engines.running.generation import ClosingStream


class RunningStream(ClosingStream):
    """Yields `events`, or gives what `generation` has; `finished` makes its end. Closing it aborts it."""

    def __init__(
        self,
        events: AsyncGenerator[Tokens | Finished, None],
        drop: Callable[[], Awaitable[None]],
        generation: ExternalGeneration,
        finished: Callable[[], Finished],
    ) -> None:
        super().__init__(events, drop)
        self._generation = generation
        self._finished = finished

    async def aclose(self) -> None:
        self._generation.listener = None
        await super().aclose()

    async def subscribe(self, ready: Callable[[], None]) -> None:
        """Calls `ready` at each change of the generation."""
        self._generation.listener = ready
        if self._generation.changed.is_set():
            ready()

    def pull(self) -> tuple[Sequence[int], Finished | None]:
        """The new tokens, and the end. Raises the generation's error."""
        self._generation.changed.clear()
        if self._generation.error is not None:
            raise self._generation.error
        has_ended = self._generation.has_ended
        tokens = self._generation.pull()
        return tokens.ids if tokens else (), self._finished() if has_ended else None
