"""Stopping one request on this worker, wherever it is."""

import time
from dataclasses import dataclass

from baton.inference.v1 import timing_pb2

from services.calls import Calls, aborted
from services.leases import LeaseTable

# Where a request is that has no blocks yet.
_QUEUES = {
    timing_pb2.STAGE_PREFILL_COMPUTE: timing_pb2.STAGE_PREFILL_QUEUE,
    timing_pb2.STAGE_DECODE: timing_pb2.STAGE_DECODE_QUEUE,
}


@dataclass(frozen=True, slots=True)
class Aborted:
    """What was stopped: the stage it had reached, and the KV that was given up, in tokens and blocks."""

    found: bool
    stage: "timing_pb2.Stage.ValueType"
    tokens_discarded: int
    blocks_freed: int
    seconds: float


class Aborter:
    """Stops calls and frees handoffs by the id of their request."""

    def __init__(self, calls: Calls, leases: LeaseTable) -> None:
        self._calls = calls
        self._leases = leases

    async def abort(self, request_id: str) -> Aborted:
        """Stops what runs and frees what is held for a request; returns when its blocks are back."""
        started = time.monotonic()
        stage = timing_pb2.STAGE_UNSPECIFIED
        tokens = blocks = 0
        calls = self._calls.find(request_id)
        for call in calls:
            call.stop(aborted(request_id))
        for call in calls:
            await call.ended.wait()
            stage = _QUEUES.get(call.stage, call.stage) if not call.footprint.blocks else call.stage
            tokens += call.footprint.tokens
            blocks += call.footprint.blocks
        leases = self._leases.of(request_id)
        if leases:
            stage = stage or timing_pb2.STAGE_HANDOFF_WAIT
            tokens += sum(lease.held.num_tokens for lease in leases)
            blocks += await self._leases.release_each(leases)
        return Aborted(bool(calls or leases), stage, tokens, blocks, time.monotonic() - started)
