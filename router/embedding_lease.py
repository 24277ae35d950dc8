"""A lease on an embedding in an encode worker's pool, as the router that asked for it holds it."""

import time
from collections.abc import Sequence

import structlog
from baton.engine.v1 import encode_pb2, handoff_pb2
from google.protobuf.duration_pb2 import Duration

from router.worker import Worker
from rpc.calls import unary
from rpc.errors import BatonError, StaleEpoch

log = structlog.get_logger(__name__)

_RELEASE_SECONDS = 2.0
_RELEASE_TO_ILL_SECONDS = 0.2
_SHORTEST_SECONDS = 0.05


class EmbeddingLease:
    """A lease on an embedding of `worker`. Not later than `remaining_seconds` from now it is over, unless renewed."""

    def __init__(self, lease: encode_pb2.EmbeddingLease, worker: Worker) -> None:
        self.worker = worker
        self._lease = lease
        self._expires_at = time.monotonic() + lease.lease.ToNanoseconds() / 1e9

    @property
    def remaining_seconds(self) -> float:
        """How long it is sure to hold."""
        return max(0.0, self._expires_at - time.monotonic())

    @property
    def holds(self) -> bool:
        """Whether it can still be read, as far as can be known here."""
        return self.remaining_seconds > 0 and not self.worker.problem and not self.worker.leaving.is_set()

    def message(self) -> encode_pb2.EmbeddingLease:
        """The lease for another to read, with what remains of it now."""
        message = encode_pb2.EmbeddingLease()
        message.CopyFrom(self._lease)
        remaining = Duration()
        remaining.FromNanoseconds(int(self.remaining_seconds * 1e9))
        message.lease.CopyFrom(remaining)
        return message

    def renewed(self, answer: handoff_pb2.HandoffLease, asked_at: float) -> None:
        """Notes what its owner has said, who was asked at that moment."""
        self._expires_at = asked_at + (answer.remaining.ToNanoseconds() / 1e9 if answer.still_valid else 0.0)

    def lose(self) -> None:
        """Notes that it is over."""
        self._expires_at = 0.0

    async def release(self) -> None:
        """Gives the blocks back, if their owner can be told within a moment; else they expire."""
        if not self.remaining_seconds:
            return
        request = handoff_pb2.ReleaseRequest(
            handoff_id=self._lease.handoff_id, epoch=self._lease.epoch, reader="router"
        )
        self.lose()
        try:
            # Nobody is to wait for one that hangs.
            seconds = _RELEASE_TO_ILL_SECONDS if self.worker.problem else _RELEASE_SECONDS
            await unary(self.worker.handoff.Release(request, timeout=seconds))
        except BatonError as error:
            log.info("left an embedding to expire", worker_id=self.worker.record.worker_id, error=error.message)

    @property
    def handoff_id(self) -> str:
        """Its name at its owner."""
        return self._lease.handoff_id

    @property
    def epoch(self) -> int:
        """The life of its owner in which it was given."""
        return self._lease.epoch


async def renew(leases: Sequence[EmbeddingLease]) -> None:
    """Renews leases of one worker, in one call. One that its owner denies is over; if nothing answers, all stay."""
    if not leases:
        return
    asked_at = time.monotonic()
    seconds = max(_SHORTEST_SECONDS, min(lease.remaining_seconds for lease in leases))
    request = handoff_pb2.RenewRequest(handoff_ids=[lease.handoff_id for lease in leases], epoch=leases[0].epoch)
    try:
        answer = await unary(leases[0].worker.handoff.Renew(request, timeout=seconds))
    except StaleEpoch:
        for lease in leases:
            lease.lose()
        return
    except BatonError:
        # It may come back while they last.
        return
    for lease, said in zip(leases, answer.leases, strict=False):
        lease.renewed(said, asked_at)
