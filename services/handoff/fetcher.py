"""The reader's side of a handoff whose KV the engines transfer themselves: check the lease, fetch, confirm."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from baton.errors import Overloaded
from baton.inference.v1 import timing_pb2
from rpc.tracing.span import stage_span
from runtime.aio import run_to_completion, run_with_background
from runtime.clock import monotonic
from services.engines.kv import KvLayout
from services.engines.kv_transfer import EngineDestination, RemoteKv, TransfersKv
from services.engines.prompt import Prompt, Sampling
from services.engines.running.generation import Generation
from services.handoff import spans as traces
from services.handoff.peers import Peers
from services.handoff.remote_handoff import Handoff, check_state
from services.handoff.remote_lease import ReaderLease
from services.requests.calls import RunningCall
from services.telemetry import metrics
from services.telemetry.timings import Timing

_TRANSPORT = "engine"
Take = Callable[[], EngineDestination]
Begin = Callable[[], Coroutine[Any, Any, Generation]]


@dataclass(frozen=True, slots=True)
class Fetched:
    """KV that was fetched and confirmed: the timings of that, and the tokens generated from it."""

    source: RemoteKv
    timings: tuple[Timing, ...]
    generation: Generation


class Fetcher:
    """Fetches handoffs through the engine's own KV transfer."""

    def __init__(self, engine: TransfersKv, layout: KvLayout, peers: Peers) -> None:
        self._engine = engine
        self._layout = layout
        self._peers = peers

    @asynccontextmanager
    async def decode_remote(
        self, handoff: Handoff, prompt: Prompt, sampling: Sampling, call: RunningCall, take: Take | None = None
    ) -> AsyncIterator[Fetched]:
        """Yields what the engine generates from the fetched and confirmed KV; closes it at the end.

        `take` gives the blocks that were allocated before, if they were.

        An invalid state can stall the engine, so the engine gets the state only after the owner has said that it holds
        the handoff. Raises InvalidRequest, LayoutMismatch, StaleEpoch and HandoffLost as Puller.pull does. Then, and on
        cancellation, the handoff is released at once; not for Overloaded.
        """
        source = RemoteKv(prompt, handoff.num_tokens, handoff.engine_state)
        async with self._peers.use(handoff) as peer, AsyncExitStack() as stack:
            lease = ReaderLease(handoff, peer.stub)
            undo = await stack.enter_async_context(AsyncExitStack())
            undo.push_async_callback(_give_up, lease)
            check_state(handoff, prompt, self._layout)
            try:
                with stage_span("handoff", {"baton.handoff.confirmed": False}) as span:
                    begin = partial(self._begin, source, sampling, stack, take)
                    fetched = await self._fetch(source, lease, call, begin)
                    await lease.confirm()
                    metrics.observe_handoff(fetched.timings)
                    traces.record_taken_over(span, handoff, fetched.timings)
            except Overloaded:
                undo.pop_all()
                raise
            undo.pop_all()
            call.stage = timing_pb2.STAGE_DECODE
            yield fetched

    async def _fetch(self, source: RemoteKv, lease: ReaderLease, call: RunningCall, begin: Begin) -> Fetched:
        started = monotonic()
        call.stage = timing_pb2.STAGE_HANDOFF_WAIT
        await call.faults.inject("reserve")
        await lease.claim(source.state)
        asked = monotonic()
        call.stage = timing_pb2.STAGE_HANDOFF_TRANSFER
        await call.faults.inject("pull")
        generation = await run_with_background(lease.keep(), begin())
        waiting = Timing(timing_pb2.STAGE_HANDOFF_WAIT, asked - started)
        moving = Timing(timing_pb2.STAGE_HANDOFF_TRANSFER, monotonic() - asked, 0, _TRANSPORT)
        return Fetched(source, (waiting, moving), generation)

    async def _begin(
        self, source: RemoteKv, sampling: Sampling, stack: AsyncExitStack, take: Take | None
    ) -> Generation:
        if take is not None:
            # Without an await before the engine owns them, so that a cancellation loses no blocks.
            source = replace(source, destination=take())
        generation = await self._engine.decode_remote(source, sampling)
        # Before any await: a caller that is cancelled never sees it, and would not close it.
        stack.push_async_callback(generation.aclose)
        return generation


async def _give_up(lease: ReaderLease) -> None:
    if not lease.is_over:
        await run_to_completion(lease.release())
