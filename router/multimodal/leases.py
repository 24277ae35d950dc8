"""A lease on an embedding in an encode worker's pool, as the router that asked for it holds it."""

from collections.abc import Sequence

import structlog
from google.protobuf.duration_pb2 import Duration

from baton.engine.v1 import encode_pb2
from baton.errors import BatonError
from engine_protocol import leases as remote
from router.workers.handle import WorkerHandle
from rpc.channels import best_effort

log = structlog.get_logger(__name__)


class EmbeddingLease:
    """A lease on an embedding of `worker`."""

    def __init__(self, message: encode_pb2.EmbeddingLease, worker: WorkerHandle) -> None:
        self.worker = worker
        self.remote = remote.RemoteLease(message.handoff_id, message.epoch, message.lease.ToNanoseconds() / 1e9)
        self._message = message

    @property
    def remaining_seconds(self) -> float:
        """The seconds that the lease is certain to hold."""
        return self.remote.remaining_seconds

    @property
    def holds(self) -> bool:
        """True if the embedding can still be read, as far as this router knows."""
        return self.remaining_seconds > 0 and not self.worker.problem and not self.worker.leaving.is_set()

    def message(self) -> encode_pb2.EmbeddingLease:
        """The lease for another to read, with what remains of it now."""
        message = encode_pb2.EmbeddingLease()
        message.CopyFrom(self._message)
        remaining = Duration()
        remaining.FromNanoseconds(int(self.remaining_seconds * 1e9))
        message.lease.CopyFrom(remaining)
        return message

    def end(self) -> None:
        """Notes that it is over."""
        self.remote.end()

    async def release(self) -> None:
        """Gives the blocks back if their owner answers within two seconds; otherwise they expire."""
        if not self.remaining_seconds:
            return
        request = self.remote.release_request("router")
        self.end()
        owner = self.worker
        answer = await best_effort(
            lambda seconds: owner.handoff.Release(request, timeout=seconds), healthy=not owner.problem
        )
        if answer is None:
            log.info("left an embedding to expire", worker_id=owner.record.worker_id)


async def renew(leases: Sequence[EmbeddingLease]) -> None:
    """Renews leases of one worker, in one call. One that its owner denies is over; if nothing answers, all stay."""
    if not leases:
        return
    seconds = max(remote.SHORTEST_SECONDS, min(lease.remaining_seconds for lease in leases))
    try:
        await remote.renew(leases[0].worker.handoff, [lease.remote for lease in leases], seconds)
    except BatonError:
        # An owner that is only away may be back while they last.
        return
