"""HandoffService, the owner's side of handoffs: its pools, and the leases on their blocks."""

from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from baton.engine.v1 import handoff_pb2, handoff_pb2_grpc
from baton.errors import LayoutMismatch
from rpc.auth.caller import certificate
from rpc.tracing.span import optional_attempt
from services.engines.kv import KvLayout
from services.engines.prompt import Lora
from services.handoff.early import PromptsInProgress, follow_response
from services.handoff.leases import Lease, LeaseTable
from services.handoff.lending import Lender, lend_response
from services.identity import Identity
from services.requests.bounds import require_names
from services.telemetry.timings import duration

SERVICE_NAME = handoff_pb2.DESCRIPTOR.services_by_name["HandoffService"].full_name


@dataclass(frozen=True, slots=True)
class HandoffOwner:
    """A worker, and the layout of its blocks."""

    identity: Identity
    layout: KvLayout

    def handoff(self, lease: Lease | None, lora: Lora | None) -> handoff_pb2.KvHandoff:
        """The handoff of blocks under a lease, without what is known of their content; empty without a lease."""
        message = handoff_pb2.KvHandoff(
            worker_id=self.identity.worker_id,
            epoch=self.identity.epoch,
            address=self.identity.address,
            layout_digest=self.layout.digest,
        )
        if lease is not None:
            held = lease.held
            message.handoff_id = lease.handoff_id
            message.lease.CopyFrom(duration(lease.remaining_seconds))
            message.num_tokens = held.num_tokens
            message.num_bytes = len(held.block_ids) * self.layout.block_bytes
            message.block_ids.extend(held.block_ids)
            message.lora_digest = lora.digest if lora else ""
        return message


@dataclass(frozen=True, slots=True)
class ExposedPool:
    """A worker's pool. `endpoints` are the ways to read it, in order of preference."""

    owner: HandoffOwner
    num_blocks: int
    endpoints: Sequence[handoff_pb2.TransportEndpoint]


class HandoffServicer(handoff_pb2_grpc.HandoffServiceServicer):
    """Lets the holders of handoffs read the pools, and renew and release their leases."""

    def __init__(
        self,
        identity: Identity,
        pools: Sequence[ExposedPool],
        leases: LeaseTable,
        prompts: PromptsInProgress,
        lender: Lender,
    ) -> None:
        self._lender = lender
        self._pools = pools
        self._identity = identity
        self._leases = leases
        self._prompts = prompts

    async def GetPool(self, request: handoff_pb2.GetPoolRequest, context: Any) -> handoff_pb2.GetPoolResponse:
        self._identity.require_epoch(request.epoch)
        pool = self._pool_of(request.layout_digest)
        if request.handoff_id:
            self._leases.require_holder(request.handoff_id, certificate())
            self._leases.require_held(request.handoff_id, request.layout_digest)
        return _pool_response(pool)

    async def Renew(self, request: handoff_pb2.RenewRequest, context: Any) -> handoff_pb2.RenewResponse:
        self._identity.require_epoch(request.epoch)
        require_names(claim__reader=request.claim.reader)
        for handoff_id in request.handoff_ids:
            self._leases.require_holder(handoff_id, certificate())
        return _renew_response((handoff_id, self._renewed(handoff_id, request)) for handoff_id in request.handoff_ids)

    async def Release(self, request: handoff_pb2.ReleaseRequest, context: Any) -> handoff_pb2.ReleaseResponse:
        self._identity.require_epoch(request.epoch)
        self._leases.require_holder(request.handoff_id, certificate())
        require_names(reader=request.reader)
        if request.fetched:
            self._leases.fetched(request.handoff_id)
        released = await self._leases.release(request.handoff_id, request.reader)
        return handoff_pb2.ReleaseResponse(still_valid=released.still_valid, blocks_freed=released.blocks_freed)

    # Writes instead of yielding: a reader that leaves ends the lease at once.
    async def Follow(self, request: handoff_pb2.FollowRequest, context: Any) -> None:  # type: ignore[override]
        self._identity.require_epoch(request.epoch)
        with optional_attempt():
            prompt = await self._prompts.find(request.request_id, certificate())
            async with aclosing(prompt.follow()) as told:
                async for blocks in told:
                    await context.write(follow_response(prompt, blocks))

    async def LendPrefix(self, request: handoff_pb2.LendPrefixRequest, context: Any) -> handoff_pb2.LendPrefixResponse:
        self._identity.require_epoch(request.epoch)
        self._pool_of(request.layout_digest)
        lent = await self._lender.lend(request)
        if lent is not None:
            release_if_undelivered(context, [lent[0].handoff_id], self._leases)
        return lend_response(lent)

    async def DigestBlocks(
        self, request: handoff_pb2.DigestBlocksRequest, context: Any
    ) -> handoff_pb2.DigestBlocksResponse:
        self._identity.require_epoch(request.epoch)
        self._leases.require_holder(request.handoff_id, certificate())
        return handoff_pb2.DigestBlocksResponse(digests=await self._lender.digest(request))

    async def List(self, request: handoff_pb2.ListRequest, context: Any) -> handoff_pb2.ListResponse:
        return handoff_pb2.ListResponse(handoffs=[_held_handoff(lease) for lease in self._leases.held])

    def _renewed(self, handoff_id: str, request: handoff_pb2.RenewRequest) -> float:
        claim = request.claim
        if request.HasField("claim") and not self._leases.claim(handoff_id, claim.reader, claim.engine_state_sha256):
            return 0.0
        return self._leases.renew(handoff_id)

    def _pool_of(self, digest: str) -> ExposedPool:
        """Returns the pool of this layout. Raises LayoutMismatch naming the layouts of the pools that exist."""
        for pool in self._pools:
            if pool.owner.layout.digest == digest:
                return pool
        worker = f"worker {self._identity.worker_id}"
        if not self._pools:
            raise LayoutMismatch(f"{worker} has no pool to read from")
        owned = " and ".join(pool.owner.layout.digest for pool in self._pools)
        raise LayoutMismatch(f"{worker} has KV layout {owned}; the reader's is {digest}")


def release_if_undelivered(context: Any, handoff_ids: Sequence[str], leases: LeaseTable) -> None:
    """Releases handoffs at once if the call ends before its response is sent."""

    def free(ended: Any) -> None:
        if not ended.done():
            for handoff_id in handoff_ids:
                leases.discard(handoff_id)

    if handoff_ids:
        context.add_done_callback(free)


def layout_message(layout: KvLayout) -> handoff_pb2.KvLayout:
    """Converts a layout to its message, with its digest."""
    return handoff_pb2.KvLayout(
        digest=layout.digest,
        model=layout.model,
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        kv_factor=layout.kv_factor,
        kv_heads=layout.kv_heads,
        block_tokens=layout.block_tokens,
        head_dim=layout.head_dim,
        block_bytes=layout.block_bytes,
    )


def _pool_response(pool: ExposedPool) -> handoff_pb2.GetPoolResponse:
    return handoff_pb2.GetPoolResponse(
        worker_id=pool.owner.identity.worker_id,
        epoch=pool.owner.identity.epoch,
        layout=layout_message(pool.owner.layout),
        num_blocks=pool.num_blocks,
        endpoints=pool.endpoints,
    )


def _renew_response(remaining: Iterable[tuple[str, float]]) -> handoff_pb2.RenewResponse:
    """`remaining` are handoff ids with the seconds left of their leases."""
    leases = [
        handoff_pb2.HandoffLease(handoff_id=handoff_id, still_valid=seconds > 0, remaining=duration(seconds))
        for handoff_id, seconds in remaining
    ]
    return handoff_pb2.RenewResponse(leases=leases)


def _held_handoff(lease: Lease) -> handoff_pb2.HeldHandoff:
    """Leaves out the handoff id, which is a secret."""
    return handoff_pb2.HeldHandoff(
        request_id=lease.request_id,
        num_blocks=len(lease.held.block_ids),
        age=duration(lease.age_seconds),
        remaining=duration(lease.remaining_seconds),
    )
