"""The requests inside an engine of another package: followed to their end, and counted.

Reports of log probabilities in our words. Engines have mappings of token ids to objects with a `logprob`.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import structlog

from baton.errors import BatonError, EngineFailed, Overloaded, Unavailable
from runtime.clock import monotonic
from services.engines.answer import Finished, PromptLogprobs, TokenLogprob, Tokens
from services.engines.running.generation import ClosingStream


class SlowReader:
    """Calls `give_up` with an error once output has waited for its reader for `seconds`, unless they are infinite."""

    def __init__(self, seconds: float, give_up: Callable[[Overloaded], None]) -> None:
        self._seconds = seconds
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None

    def has_output(self) -> None:
        """Notes that there is output that the reader does not have yet."""
        if self._timer is None and self._seconds < math.inf:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._is_late)

    def has_read(self) -> None:
        """Notes that the reader has everything, or that it need not read."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self) -> None:
        self._timer = None
        self._give_up(Overloaded(f"the answer was not read for {self._seconds} s", retry_after_seconds=1.0))


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits: requests that may run and wait, tokens of a block, and seconds that a reader and an abort may take."""

    requests: int
    block_tokens: int
    reader_seconds: float
    abort_seconds: float


class ExternalGeneration:
    """A request that is followed to its end, at the engine's pace, however slow its reader is.

    `changed` is set, and `listener` called, whenever there is more; `error` says why it ended early. A subclass gives
    up by `_give_up` an answer that is not read for `reader_seconds`.
    """

    def __init__(self, title: str, reader_seconds: float) -> None:
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()
        self.listener: Callable[[], None] | None = None
        self.error: BatonError | None = None
        self.finish_reason: str | None = None
        self.ended_at: float | None = None
        self._title = title
        self._reader = SlowReader(reader_seconds, self._give_up)
        self._following: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None

    @property
    def num_tokens(self) -> int:
        """Tokens with KV: those of the context and the generated ones."""
        raise NotImplementedError

    def pull(self) -> Tokens | None:
        """All tokens that were not pulled yet."""
        raise NotImplementedError

    async def reached(self, is_there: Callable[[], bool] = lambda: False) -> None:
        """Waits until something is there, or for the end."""
        while not (is_there() or self.has_ended):
            await self.changed.wait()
            self.changed.clear()

    async def ending(self) -> None:
        """Waits for the end. Raises what ended it early."""
        await self.reached()
        if self.error is not None:
            raise self.error

    def end(self, error: BatonError | None = None) -> None:
        """Ends it, with an error or without."""
        if self.has_ended:
            return
        self.ended_at = monotonic()
        self._reader.has_read()
        self.error = error
        if error is None and self.finish_reason is None:
            self.error = EngineFailed(f"{self._title} ended the request without a reason")
        self._wake()
        self.ended.set()

    def _wake(self) -> None:
        self.changed.set()
        if self.listener is not None:
            self.listener()

    def _give_up(self, error: Overloaded) -> None:
        raise NotImplementedError


class RunningStream(ClosingStream):
    """An answer that is generated already: it yields `events`, or gives what `generation` has.

    `finished` makes its end. Closing it aborts it.
    """

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


Generation = TypeVar("Generation", bound=ExternalGeneration)


class ExternalRequests(Generic[Generation]):
    """At most `most` requests. A fatal error of the engine fails all of them, and every later one.

    A subclass submits them by `follow`, and converts the errors of the package, named `title`, by `_converted`.
    """

    def __init__(self, title: str, most: int, block_tokens: int) -> None:
        self.failure: EngineFailed | None = None
        self._title = title
        self._most = most
        self._block_tokens = block_tokens
        self._tasks: dict[Generation, asyncio.Task[None]] = {}
        self._progressed_at = monotonic()

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def blocks(self) -> int:
        """Blocks of their tokens so far. The engine's own number may be a little higher."""
        return sum(-(-each.num_tokens // self._block_tokens) for each in self._tasks)

    @property
    def stalled_seconds(self) -> float:
        """The seconds that work has been here without any progress."""
        return self.quiet_seconds if self._tasks else 0.0

    @property
    def quiet_seconds(self) -> float:
        """The seconds without progress, with work or without."""
        return monotonic() - self._progressed_at

    def progressed(self) -> None:
        """Notes that the engine made progress of any kind."""
        self._progressed_at = monotonic()

    def require_capacity(self) -> None:
        """Raises Overloaded if too many are here, and Unavailable after a fatal error.

        Unavailable, so that a router sends no more requests at once. It would take one failure to be the request's own,
        and spend its budget of retries before the next health check says more.
        """
        if self.failure is not None:
            raise Unavailable(self.failure.message)
        if len(self._tasks) >= self._most:
            raise Overloaded(f"{len(self._tasks)} requests run and wait here", retry_after_seconds=1.0)
        if not self._tasks:
            self.progressed()

    def follow(self, generation: Generation, task: "asyncio.Task[None]") -> Generation:
        """Counts a generation until its task ends, and then ends it."""
        self._tasks[generation] = task
        task.add_done_callback(partial(self._ended, generation))
        return generation

    async def close(self) -> None:
        """Stops following all requests."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, generation: Generation, task: "asyncio.Task[None]") -> None:
        del self._tasks[generation]
        error: BatonError | None = None
        if task.cancelled():
            error = EngineFailed("the request was aborted")
        elif (raised := task.exception()) is not None:
            error = raised if isinstance(raised, BatonError) else self._converted(raised)
        generation.end(error)
        self._record_end(generation)

    def _record_end(self, generation: Generation) -> None:
        if generation.error is None:
            self.progressed()

    def _converted(self, error: BaseException) -> BatonError:
        raise NotImplementedError

    def _fail(self, error: BaseException) -> EngineFailed:
        """The failure of the engine, which is that of the first fatal error."""
        if self.failure is None:
            log.error("engine failed", engine=self._title, error=text_of(error))
            self.failure = EngineFailed(f"{self._title} has ended: {text_of(error)}")
        return self.failure


def text_of(error: BaseException) -> str:
    """An error of another package, in one line, with its cause: vLLM raises some without a message of their own."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text}, from {text_of(error.__cause__)}" if error.__cause__ else text


def token_logprob(token_id: int, report: Mapping[int, Any] | float, top: int) -> TokenLogprob:
    """Converts a report of the likeliest tokens and the sampled one, wherever it ranks; or of its number alone."""
    if isinstance(report, float):
        return TokenLogprob(token_id, report)
    return TokenLogprob(token_id, float(report[token_id].logprob), _likeliest(report, top))


def prompt_logprobs(token_ids: Sequence[int], reports: Sequence[Mapping[int, Any] | None], top: int) -> PromptLogprobs:
    """Converts one report for each token of a prompt, of which the first is empty. Each has at least `top` tokens."""
    pairs = list(zip(token_ids, reports, strict=False))[1:]
    told = [token_logprob(token_id, report or {}, top) for token_id, report in pairs]
    return PromptLogprobs(
        logprobs=tuple(each.logprob for each in told),
        top=top,
        top_ids=tuple(token_id for each in told for token_id, _ in each.top),
        top_logprobs=tuple(logprob for each in told for _, logprob in each.top),
    )


def _likeliest(report: Mapping[int, Any], top: int) -> tuple[tuple[int, float], ...]:
    ranked = sorted(report.items(), key=lambda item: -item[1].logprob)
    return tuple((token_id, float(value.logprob)) for token_id, value in ranked[:top])
