"""A lease on another worker's blocks during a read: renewed, then confirmed or released."""

import asyncio
import hashlib

import structlog

from baton.calls import unary
from baton.engine.v1 import handoff_pb2, handoff_pb2_grpc
from baton.errors import BatonError, HandoffLost, StaleEpoch, Unavailable
from engine_protocol.leases import RemoteLease, renew
from rpc.channels import best_effort
from rpc.timeouts import LEASE_ANSWER_SECONDS
from runtime.entropy import token_urlsafe
from services.handoff.remote_handoff import LeasedBlocks

log = structlog.get_logger(__name__)

# The age of a lease is unknown when it arrives. A pull that takes less time than this needs no renewal.
_FIRST_RENEWAL_SECONDS = 0.1
_RETRY_SECONDS = 0.2


class ReaderLease:
    """A lease of another worker, for one pull. Run `keep` in the background, then call one of the other methods."""

    def __init__(self, leased: LeasedBlocks, owner: "handoff_pb2_grpc.HandoffServiceAsyncStub") -> None:
        self._lease = RemoteLease(leased.handoff_id, leased.epoch, leased.lease_seconds)
        self._owner = owner
        self._worker_id = leased.worker_id
        # The owner repeats the answer of a release to the same reader only.
        self._reader = token_urlsafe(12)

    @property
    def is_over(self) -> bool:
        """True if the owner has said that the lease has ended, so that there is nothing to release."""
        return self._lease.is_over

    async def keep(self) -> None:
        """Renews after each third of the lease, until cancelled. Raises HandoffLost or StaleEpoch once the lease has
        ended.
        """
        delay = min(_FIRST_RENEWAL_SECONDS, self._lease.renewal_delay_seconds)
        while True:
            await asyncio.sleep(delay)
            try:
                await self._renew()
                delay = self._lease.renewal_delay_seconds
            except Unavailable:
                # The owner may recover before the lease ends.
                delay = min(_RETRY_SECONDS, self._lease.remaining_seconds)

    async def confirm(self) -> None:
        """Ends the lease. Raises HandoffLost or StaleEpoch unless the owner says that it held until now."""
        timeout_seconds = self._answer_seconds()
        request = self._lease.release_request(self._reader, fetched=True)
        try:
            answer = await unary(self._owner.Release(request, timeout=timeout_seconds))
        except StaleEpoch:
            self._lease.end()
            raise
        except BatonError as error:
            raise self._lost(error.message) from error
        self._lease.end()
        if not answer.still_valid:
            raise self._lost("its lease did not hold")

    async def check(self) -> None:
        """Renews the lease once, without ending it. Raises HandoffLost or StaleEpoch if it has ended."""
        await self._checked()

    async def claim(self, engine_state: bytes) -> None:
        """Renews the lease once, and makes this reader its only one. `engine_state` must be what the owner gave out.

        Raises HandoffLost or StaleEpoch if the lease has ended or the owner refuses the claim.
        """
        digest = hashlib.sha256(engine_state).digest()
        await self._checked(handoff_pb2.HandoffClaim(reader=self._reader, engine_state_sha256=digest))

    async def _checked(self, claim: handoff_pb2.HandoffClaim | None = None) -> None:
        try:
            await self._renew(claim)
        except Unavailable as error:
            raise self._lost(error.message) from error

    async def release(self) -> None:
        """Ends the lease if the owner answers quickly; otherwise the lease expires."""
        request = self._lease.release_request(self._reader)
        answer = await best_effort(lambda seconds: self._owner.Release(request, timeout=seconds), healthy=True)
        if answer is None:
            log.info("handoff not released; it will expire", owner=self._worker_id)

    async def _renew(self, claim: handoff_pb2.HandoffClaim | None = None) -> None:
        try:
            await renew(self._owner, [self._lease], self._answer_seconds(), claim)
        except (StaleEpoch, Unavailable):
            raise
        except BatonError as error:
            raise self._lost(error.message) from error
        if self._lease.is_over:
            raise self._lost("its lease did not hold")

    def _answer_seconds(self) -> float:
        remaining = self._lease.remaining_seconds
        if not remaining:
            raise self._lost("its owner did not answer before the lease was over")
        return min(LEASE_ANSWER_SECONDS, remaining)

    def _lost(self, why: str) -> HandoffLost:
        return HandoffLost(f"the handoff from worker {self._worker_id} is lost: {why}")
