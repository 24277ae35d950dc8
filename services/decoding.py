"""A request's second half: its KV is pulled, or its prompt run here, and then it is decoded to its end."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from services import limits, metrics, traces
from services.answer import Finished, Tokens
from services.calls import Call
from services.clock import DecodeClock
from services.engine import Engine
from services.faults import NO_FAULTS, Faults
from services.fetching import Fetcher
from services.handoffs import Handoff, Timing
from services.prompt import Prompt, Sampling
from services.pull import Puller


@dataclass(frozen=True, slots=True)
class Accepted:
    """The cache is here and confirmed, or the prompt is queued; and what waiting and pulling took so far."""

    timings: tuple[Timing, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be decoded. Without a handoff the prompt is run here."""

    prompt: Prompt
    sampling: Sampling
    handoff: Handoff | None


@dataclass(frozen=True, slots=True)
class _Begun:
    """How to have the engine generate, once."""

    accepted: Accepted
    generate: Callable[[], AsyncGenerator[Tokens | Finished, None]]


class Decoder:
    """Runs decodes on an engine, pulling what was computed elsewhere, unless the engine fetches that itself."""

    def __init__(self, engine: Engine, puller: Puller, fetcher: Fetcher | None) -> None:
        self._engine = engine
        self._puller = puller
        self._fetcher = fetcher

    async def decode(self, work: Work, call: Call) -> AsyncGenerator[Accepted | Tokens | Finished, None]:
        """Accepted, tokens, Finished. Raises what Puller.pull, Fetcher.take_over and the engine raise.

        Closing it, or cancelling the task that reads it, frees everything on both workers.
        """
        limits.check(self._engine.facts, work.prompt, work.sampling)
        await call.faults.strike("queue")
        async with self._begun(work, call) as begun:
            yield begun.accepted
            clock = DecodeClock(call.clock, is_pulled=work.handoff is not None)
            async with aclosing(begun.generate()) as events:
                generated = len(work.prompt.emitted)
                async for event in events:
                    timed = clock.saw(event)
                    if not isinstance(timed, Tokens):
                        metrics.observe_decode(timed, is_pulled=clock.is_pulled)
                        traces.decoded(timed, clock, generated - len(work.prompt.emitted))
                        yield timed
                        continue
                    metrics.GENERATED_TOKENS.inc(len(timed.ids))
                    for piece in _pieces(timed, generated, call.faults):
                        yield piece
                        generated += len(piece.ids)
                        await _strike(call.faults, generated, clock)

    @asynccontextmanager
    async def _begun(self, work: Work, call: Call) -> AsyncIterator[_Begun]:
        if work.handoff is None:
            yield _Begun(Accepted(tuple(call.clock.timings)), partial(self._engine.decode, work.prompt, work.sampling))
        elif self._fetcher is not None:
            async with self._fetcher.take_over(work.handoff, work.prompt, work.sampling, call) as fetched:
                call.clock.add(fetched.timings)
                yield _Begun(Accepted(fetched.timings), lambda: fetched.events)
        else:
            async with self._puller.pull(work.handoff, work.prompt, call) as pulled:
                call.clock.add(pulled.timings)
                yield _Begun(Accepted(pulled.timings), partial(self._engine.decode, pulled.kv, work.sampling))


async def _strike(faults: Faults, generated: int, clock: DecodeClock) -> None:
    if faults is NO_FAULTS:
        return
    started = time.perf_counter()
    await faults.strike("decode", generated)
    clock.struck(time.perf_counter() - started)


def _pieces(tokens: Tokens, generated: int, faults: Faults) -> list[Tokens]:
    """The same tokens, parted where a fault is planned: those before it are sent first."""
    cuts = [count - generated for count in faults.token_counts if generated < count < generated + len(tokens.ids)]
    if not cuts:
        return [tokens]
    starts, ends = [0, *cuts], [*cuts, len(tokens.ids)]
    return [Tokens(tokens.ids[start:end], tokens.logprobs[start:end]) for start, end in zip(starts, ends, strict=True)]
