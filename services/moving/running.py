"""The running decodes of a worker, for the routers that move them: they yield, or lend full blocks, under leases.

The number of decodes that a worker wants to give away: routers are told with its load, and move them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.engine.v1 import handoff_pb2
from rpc.tracing.span import current_span
from runtime.clock import monotonic
from services.engines.answer import Finished, FinishReason
from services.engines.base import EngineLoad
from services.engines.kv import HeldBlocks, HeldKv
from services.engines.prompt import Prompt
from services.engines.running.generation import Generation
from services.handoff.leases import Lease, LeaseTable
from services.handoff.service import HandoffOwner
from services.requests.calls import Calls, RunningCall
from services.telemetry import metrics


@dataclass(slots=True, eq=False)
class RunningDecode:
    """One decode, until its end. After it has yielded, `lease` holds its KV, if it had any."""

    request_id: str
    prompt: Prompt
    generation: Generation
    call: RunningCall
    decodes: "RunningDecodes"
    readers: frozenset[str] = frozenset()
    held: HeldKv | None = None
    lease: Lease | None = None
    is_handed_over: bool = False

    def ended(self, end: Finished) -> None:
        """Takes over the KV of a decode that has yielded; what is not taken over its generation frees."""
        if end.reason is FinishReason.YIELDED:
            metrics.YIELDED_DECODES.inc()
            self.held = self.generation.pop_held()
            if self.held is not None:
                self.lease = self.decodes.hold(self.request_id, self.held, self.readers)

    def hand_over(self) -> handoff_pb2.KvHandoff | None:
        """The handoff of its KV, for a reader that frees it; None if it had none."""
        self.is_handed_over = True
        if self.held is None:
            return None
        handoff = self.decodes.owner.handoff(self.lease, self.prompt.lora)
        handoff.traceparent = current_span().traceparent
        handoff.prefix_hash, handoff.is_yielded = self.held.prefix_hash, True
        handoff.first_token.token_id = self.held.first_token
        return handoff


class RunningDecodes:
    """The running decodes of a worker, by their requests' ids, and the leases that hold what they give."""

    def __init__(self, owner: HandoffOwner, leases: LeaseTable) -> None:
        self.owner = owner
        self._leases = leases
        self._running: dict[str, RunningDecode] = {}

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def running(
        self, request_id: str, prompt: Prompt, generation: Generation, call: RunningCall
    ) -> Iterator[RunningDecode]:
        """Lets routers move a decode while the context is open. Frees at its end what was not handed over."""
        decode = self._running[request_id] = RunningDecode(request_id, prompt, generation, call, self)
        try:
            yield decode
        finally:
            del self._running[request_id]
            if decode.lease is not None and not decode.is_handed_over:
                self._leases.discard(decode.lease.handoff_id)

    async def yield_next(self, request_id: str, readers: frozenset[str]) -> bool:
        """Ends a decode at its next token. False if it does not run. Raises Unsupported."""
        decode = self._running.get(request_id)
        if decode is None:
            return False
        decode.readers = readers
        await decode.call.faults.inject("yield")
        await decode.generation.yield_next()
        return True

    async def lend(self, request_id: str, num_tokens: int, readers: frozenset[str]) -> handoff_pb2.KvHandoff | None:
        """Holds a decode's full blocks within so many ids; None if it has none. Raises Unsupported."""
        decode = self._running.get(request_id)
        if decode is None:
            return None
        await decode.call.faults.inject("lend")
        lent = await decode.generation.lend(num_tokens)
        if lent is None:
            return None
        lease = self.hold(request_id, lent, readers)
        handoff = self.owner.handoff(lease, decode.prompt.lora)
        handoff.prefix_hash = lent.prefix_hash
        handoff.first_token.token_id = lent.next_token
        return handoff

    def hold(self, request_id: str, held: HeldBlocks, readers: frozenset[str]) -> Lease:
        """Puts the KV of a decode under a lease."""
        return self._leases.hold(request_id, held, self.owner.layout.digest, readers)


# Below this share of free blocks a decode is moved away, before one has to be preempted and computed again.
_LEAST_FREE = 0.04
# An operator's wish that no other worker has had room for is dropped.
_WISH_SECONDS = 30.0


class Shedding:
    """The decodes that a worker wants to give away now."""

    def __init__(self, decodes: RunningDecodes, calls: Calls) -> None:
        self._decodes = decodes
        self._calls = calls
        self._most_left = 0
        self._wish_until = 0.0
        self._loses_role = False

    def shed(self, streams: int) -> int:
        """Wants to give so many of the running ones away, all if 0. Returns how many these are."""
        running = len(self._decodes)
        count = min(streams, running) if streams else running
        self._most_left, self._wish_until = running - count, monotonic() + _WISH_SECONDS
        return count

    @contextmanager
    def shedding_all(self, *, is_needed: bool) -> Iterator[None]:
        """Wants to give all away while the context is open, if it loses the role."""
        self._loses_role = is_needed
        try:
            yield
        finally:
            self._loses_role = False

    def wanted(self, load: EngineLoad) -> int:
        """The number that it wants to give away."""
        running = len(self._decodes)
        if self._loses_role or self._calls.draining:
            return running
        if monotonic() < self._wish_until and running > self._most_left:
            return running - self._most_left
        self._wish_until = 0.0
        # Each of them may need a block within the next tokens.
        is_full = load.blocks_total - load.blocks_used < max(_LEAST_FREE * load.blocks_total, running)
        return 1 if is_full and running > 1 else 0
