"""A lease on another worker's blocks, as its reader sees it: kept while it is needed, confirmed, or given up."""

import asyncio
import secrets
import time

import structlog
from baton.engine.v1 import handoff_pb2, handoff_pb2_grpc

from rpc.calls import unary
from rpc.errors import BatonError, HandoffLost, StaleEpoch, Unavailable
from services.handoffs import LeasedBlocks

log = structlog.get_logger(__name__)

# Nobody knows how long a handoff was on its way; a pull that takes no longer than this needs no renewal at all.
_FIRST_RENEWAL_SECONDS = 0.1
_RETRY_SECONDS = 0.2
_GIVE_UP_SECONDS = 2.0
# An owner that is silent for longer hangs. To run the prompt again is quicker than to wait for the end of its lease.
_ANSWER_SECONDS = 2.0


class RemoteLease:
    """Not later than `remaining_seconds` from now it may be over: renewals move that, and nothing else does."""

    def __init__(self, leased: LeasedBlocks, stub: "handoff_pb2_grpc.HandoffServiceAsyncStub") -> None:
        self._leased = leased
        self._stub = stub
        # Whether its owner has said that it is over: then there is nothing to give up.
        self.over = False
        # A release that is sent again is answered again, but only to the same reader.
        self._reader = secrets.token_urlsafe(12)
        self._expires_at = time.monotonic() + leased.lease_seconds

    @property
    def remaining_seconds(self) -> float:
        return max(0.0, self._expires_at - time.monotonic())

    @property
    def _patience_seconds(self) -> float:
        return min(_ANSWER_SECONDS, self.remaining_seconds)

    async def keep(self) -> None:
        """Renews every third of the lease, until cancelled. Raises HandoffLost or StaleEpoch once it cannot hold."""
        delay = min(_FIRST_RENEWAL_SECONDS, self.remaining_seconds / 3)
        while True:
            await asyncio.sleep(delay)
            try:
                await self._renew()
                delay = self.remaining_seconds / 3
            except Unavailable:
                # It may come back while the lease lasts.
                delay = min(_RETRY_SECONDS, self.remaining_seconds)

    async def confirm(self) -> None:
        """Ends the lease. Raises HandoffLost or StaleEpoch unless its owner says that it held until now."""
        self._require_time()
        try:
            answer = await unary(self._stub.Release(self._request(fetched=True), timeout=self._patience_seconds))
        except StaleEpoch:
            self.over = True
            raise
        except BatonError as error:
            raise self._lost(error.message) from error
        self.over = True
        if not answer.still_valid:
            raise self._lost("its lease did not hold")

    async def confirm_and_leave(self) -> None:
        """Sees that the lease holds, and leaves it to whoever else has it. Raises HandoffLost or StaleEpoch."""
        try:
            await self._renew()
        except Unavailable as error:
            raise self._lost(error.message) from error

    async def give_up(self) -> None:
        """Ends the lease if its owner can be told within a moment; otherwise it expires by itself."""
        try:
            await unary(self._stub.Release(self._request(fetched=False), timeout=_GIVE_UP_SECONDS))
        except BatonError as error:
            log.info("left a handoff to expire", owner=self._leased.worker_id, error=error.message)

    async def _renew(self) -> None:
        self._require_time()
        sent = time.monotonic()
        request = handoff_pb2.RenewRequest(handoff_ids=[self._leased.handoff_id], epoch=self._leased.epoch)
        try:
            answer = await unary(self._stub.Renew(request, timeout=self._patience_seconds))
        except StaleEpoch:
            self.over = True
            raise
        except Unavailable:
            raise
        except BatonError as error:
            raise self._lost(error.message) from error
        if len(answer.leases) != 1 or not answer.leases[0].still_valid:
            self.over = True
            raise self._lost("its lease did not hold")
        self._expires_at = sent + answer.leases[0].remaining.ToNanoseconds() / 1e9

    def _require_time(self) -> None:
        if not self.remaining_seconds:
            raise self._lost("its owner did not answer before the lease was over")

    def _request(self, *, fetched: bool) -> handoff_pb2.ReleaseRequest:
        leased = self._leased
        return handoff_pb2.ReleaseRequest(
            handoff_id=leased.handoff_id, epoch=leased.epoch, reader=self._reader, fetched=fetched
        )

    def _lost(self, why: str) -> HandoffLost:
        return HandoffLost(f"the handoff from worker {self._leased.worker_id} is lost: {why}")
