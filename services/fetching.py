"""The decode side of a handoff whose KV the engines move between themselves: asked for, fetched, confirmed."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.inference.v1 import timing_pb2

from rpc.errors import Overloaded
from rpc.settle import do_while, finish
from rpc.tracing.span import stage_span
from services import metrics, traces
from services.answer import Finished, Tokens
from services.calls import Call
from services.handoffs import Handoff, Timing, check_state
from services.kv import KvLayout
from services.kv_elsewhere import HandedKv, MovesKv
from services.peers import Peers
from services.prompt import Prompt, Sampling
from services.remote_lease import RemoteLease

_TRANSPORT = "engine"
Events = AsyncGenerator[Tokens | Finished, None]


@dataclass(frozen=True, slots=True)
class Fetched:
    """KV that is here and confirmed, what that took, and what is made of it."""

    source: HandedKv
    timings: tuple[Timing, ...]
    events: Events


class Fetcher:
    """Takes handoffs over by the engine's own means."""

    def __init__(self, engine: MovesKv, layout: KvLayout, peers: Peers) -> None:
        self._engine = engine
        self._layout = layout
        self._peers = peers

    @asynccontextmanager
    async def take_over(
        self, handoff: Handoff, prompt: Prompt, sampling: Sampling, call: Call
    ) -> AsyncIterator[Fetched]:
        """What the engine generates from fetched and confirmed KV; closed at the end.

        The engine sees no state before the owner has said that it holds this handoff: a wrong one can stall it. Raises
        InvalidRequest, LayoutMismatch, StaleEpoch and HandoffLost as Puller.pull does; then, and if it is cancelled,
        the handoff is released at once, except for Overloaded.
        """
        source = HandedKv(prompt, handoff.num_tokens, handoff.engine_state)
        async with self._peers.use(handoff) as peer, AsyncExitStack() as stack:
            lease = RemoteLease(handoff, peer.stub)
            undo = await stack.enter_async_context(AsyncExitStack())
            undo.push_async_callback(_give_up, lease)
            check_state(handoff, prompt, self._layout)
            try:
                with stage_span("handoff", {"baton.handoff.confirmed": False}) as span:
                    fetched = await self._fetch(source, lease, call, partial(self._begin, source, sampling, stack))
                    await lease.confirm()
                    metrics.observe_handoff(fetched.timings)
                    traces.taken_over(span, handoff, fetched.timings)
            except Overloaded:
                undo.pop_all()
                raise
            undo.pop_all()
            call.stage = timing_pb2.STAGE_DECODE
            yield fetched

    async def _fetch(
        self, source: HandedKv, lease: RemoteLease, call: Call, begin: Callable[[], Coroutine[Any, Any, Events]]
    ) -> Fetched:
        started = time.monotonic()
        call.stage = timing_pb2.STAGE_HANDOFF_WAIT
        await call.faults.strike("reserve")
        await lease.confirm_and_leave()
        asked = time.monotonic()
        call.stage = timing_pb2.STAGE_HANDOFF_TRANSFER
        await call.faults.strike("pull")
        events = await do_while(lease.keep(), begin())
        waiting = Timing(timing_pb2.STAGE_HANDOFF_WAIT, asked - started)
        moving = Timing(timing_pb2.STAGE_HANDOFF_TRANSFER, time.monotonic() - asked, 0, _TRANSPORT)
        return Fetched(source, (waiting, moving), events)

    async def _begin(self, source: HandedKv, sampling: Sampling, stack: AsyncExitStack) -> Events:
        events = await self._engine.take_over(source, sampling)
        # At once: whoever waits for this may be cancelled and never see it.
        stack.push_async_callback(events.aclose)
        return events


async def _give_up(lease: RemoteLease) -> None:
    if not lease.over:
        await finish(lease.give_up())
