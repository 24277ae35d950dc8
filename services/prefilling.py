"""A request's first half: its prompt's KV is computed and put under a lease."""

import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass

from services import limits, metrics, traces
from services.calls import Call
from services.engine import Engine
from services.faults import NO_FAULTS, corrupt
from services.handoffs import Timing
from services.kv import HeldKv
from services.leases import Lease, LeaseTable
from services.prompt import Prompt, Sampling


@dataclass(frozen=True, slots=True)
class Claim:
    """Whose the KV will be: a request's, and by certificate those who may take it over; everybody, if none is named."""

    request_id: str
    holders: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A first token, what it took, and the lease on what it was computed from; no lease if it ended the request."""

    kv: HeldKv
    prompt_tokens: int
    lease: Lease | None
    timings: tuple[Timing, ...]


class Prefiller:
    """Runs prompts on an engine, and gives what they leave to the lease table."""

    def __init__(self, engine: Engine, leases: LeaseTable) -> None:
        self._engine = engine
        self._leases = leases

    async def prefill(self, claim: Claim, prompt: Prompt, sampling: Sampling, call: Call) -> Prefilled:
        """Computes and holds. Raises what the engine raises; cancelling it frees everything."""
        limits.check(self._engine.facts, prompt, sampling)
        await call.faults.strike("queue")
        asked = time.perf_counter()
        kv = await self._engine.prefill(prompt, sampling)
        if call.faults is not NO_FAULTS:
            await self._spoil(kv, call)
        # From the engine's hands to the table's without an await in between: nothing can be lost here.
        lease = self._leases.hold(claim.request_id, kv, claim.holders) if kv.finish_reason is None else None
        if lease and call.faults is not NO_FAULTS:
            await self._spoil_held(lease, call)
        timings = call.clock.prefilled(asked, kv.queue_seconds)
        metrics.observe_prefill(timings, kv, len(prompt.token_ids))
        traces.prefilled(timings, kv, len(prompt.token_ids))
        return Prefilled(kv, len(prompt.token_ids), lease, timings)

    async def _spoil(self, kv: HeldKv, call: Call) -> None:
        async with AsyncExitStack() as undo:
            undo.push_async_callback(kv.release)
            await call.faults.strike("prefill")
            undo.pop_all()

    async def _spoil_held(self, lease: Lease, call: Call) -> None:
        with ExitStack() as undo:
            undo.callback(self._leases.discard, lease.handoff_id)
            if call.faults.has("corrupt", "held"):
                corrupt(self._engine.memory, lease.held.block_ids)
            await call.faults.strike("held")
            if not call.faults.has("drop", "held"):
                undo.pop_all()
