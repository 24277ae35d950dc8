"""A request's first half: its prompt's KV is computed and put under a lease."""

import time
from dataclasses import dataclass

from services import limits, traces
from services.calls import Call
from services.engine import Engine, HeldKv, Prompt, Sampling
from services.leases import Lease, LeaseTable


@dataclass(frozen=True, slots=True)
class Claim:
    """Whose the KV will be: a request's, and by certificate those who may take it over; everybody, if none is named."""

    request_id: str
    holders: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A first token, and the lease on what it was computed from; no lease if it ended the request."""

    kv: HeldKv
    prompt_tokens: int
    lease: Lease | None


class Prefiller:
    """Runs prompts on an engine, and gives what they leave to the lease table."""

    def __init__(self, engine: Engine, leases: LeaseTable) -> None:
        self._engine = engine
        self._leases = leases

    async def prefill(self, claim: Claim, prompt: Prompt, sampling: Sampling, call: Call) -> Prefilled:
        """Computes and holds. Raises what the engine raises; cancelling it frees everything."""
        limits.check(self._engine.facts, prompt, sampling)
        call.tokens = len(prompt.context)
        started = time.perf_counter()
        kv = await self._engine.prefill(prompt, sampling)
        # From the engine's hands to the table's without an await in between: nothing can be lost here.
        lease = self._leases.hold(claim.request_id, kv, claim.holders) if kv.finish_reason is None else None
        traces.prefilled(started, kv, len(prompt.token_ids))
        return Prefilled(kv, len(prompt.token_ids), lease)
