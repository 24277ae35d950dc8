"""A lease on blocks of another worker, as its holder sees it: how long it lasts, and its renewal.

Deadlines are counted from before the owner was asked, so a lease never ends later here than at its owner.
"""

from collections.abc import Sequence

from baton.calls import unary
from baton.engine.v1 import handoff_pb2, handoff_pb2_grpc
from baton.errors import StaleEpoch
from runtime.clock import monotonic

# Renewing a lease more often than this would not save one that is about to end.
SHORTEST_SECONDS = 0.05
# No owner grants a longer one: what remains of it is sent on, and waited for.
_LONGEST_SECONDS = 3600.0


class RemoteLease:
    """A lease that its owner granted in `epoch`, for `seconds` from now. Only a renewal makes it longer."""

    __slots__ = ("_expires_at", "epoch", "handoff_id", "is_over")

    def __init__(self, handoff_id: str, epoch: int, seconds: float) -> None:
        self.handoff_id = handoff_id
        self.epoch = epoch
        # Whether the owner has denied it, or it was released: then there is nothing left to release.
        self.is_over = False
        self._expires_at = monotonic() + min(seconds, _LONGEST_SECONDS)

    @property
    def remaining_seconds(self) -> float:
        """The seconds that the lease is certain to hold."""
        return 0.0 if self.is_over else max(0.0, self._expires_at - monotonic())

    @property
    def renewal_delay_seconds(self) -> float:
        """The seconds to wait before the next renewal: a third of the remaining ones."""
        return self.remaining_seconds / 3

    def end(self) -> None:
        """Notes that it is over."""
        self.is_over = True

    def renewed(self, answer: handoff_pb2.HandoffLease, asked_at: float) -> None:
        """Notes the owner's answer to a renewal that was sent at `asked_at`, of time.monotonic."""
        if answer.still_valid:
            self._expires_at = asked_at + min(answer.remaining.ToNanoseconds() / 1e9, _LONGEST_SECONDS)
        else:
            self.end()

    def release_request(self, reader: str, *, fetched: bool = False) -> handoff_pb2.ReleaseRequest:
        """The message that ends it. A repeated release gets the same answer only with the same `reader`."""
        return handoff_pb2.ReleaseRequest(handoff_id=self.handoff_id, epoch=self.epoch, reader=reader, fetched=fetched)


async def renew(
    owner: "handoff_pb2_grpc.HandoffServiceAsyncStub",
    leases: Sequence[RemoteLease],
    timeout_seconds: float,
    claim: handoff_pb2.HandoffClaim | None = None,
) -> None:
    """Renews leases of one epoch of one owner, in one call, and claims them; those that it denies are over.

    Raises StaleEpoch, after which all are over, and any other BatonError of the call, which changes none of them.
    """
    asked_at = monotonic()
    request = handoff_pb2.RenewRequest(
        handoff_ids=[lease.handoff_id for lease in leases], epoch=leases[0].epoch, claim=claim
    )
    try:
        answer = await unary(owner.Renew(request, timeout=timeout_seconds))
    except StaleEpoch:
        for lease in leases:
            lease.end()
        raise
    for lease, renewed in zip(leases, answer.leases, strict=False):
        lease.renewed(renewed, asked_at)
    for lease in leases[len(answer.leases) :]:
        lease.end()
