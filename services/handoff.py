"""HandoffService: the owner's side of every handoff."""

from collections.abc import Sequence
from typing import Any

from baton.engine.v1 import handoff_pb2, handoff_pb2_grpc

from rpc.caller import certificate
from services import convert
from services.identity import Identity
from services.leases import LeaseTable
from services.owner import OfferedPool, pool_of


class HandoffServicer(handoff_pb2_grpc.HandoffServiceServicer):
    """Lets the holders of handoffs read the pools, and keep and end their leases."""

    def __init__(self, identity: Identity, pools: Sequence[OfferedPool], leases: LeaseTable) -> None:
        self._pools = pools
        self._identity = identity
        self._leases = leases

    async def GetPool(self, request: handoff_pb2.GetPoolRequest, context: Any) -> handoff_pb2.GetPoolResponse:
        self._identity.require_epoch(request.epoch)
        return convert.get_pool_response(pool_of(self._pools, request.layout_digest))

    async def Renew(self, request: handoff_pb2.RenewRequest, context: Any) -> handoff_pb2.RenewResponse:
        self._identity.require_epoch(request.epoch)
        for handoff_id in request.handoff_ids:
            self._leases.require_holder(handoff_id, certificate())
        return convert.renew_response(
            [(handoff_id, self._leases.renew(handoff_id)) for handoff_id in request.handoff_ids]
        )

    async def Release(self, request: handoff_pb2.ReleaseRequest, context: Any) -> handoff_pb2.ReleaseResponse:
        self._identity.require_epoch(request.epoch)
        self._leases.require_holder(request.handoff_id, certificate())
        if request.fetched:
            self._leases.fetched(request.handoff_id)
        released = await self._leases.release(request.handoff_id, request.reader)
        return handoff_pb2.ReleaseResponse(still_valid=released.still_valid, blocks_freed=released.blocks_freed)

    async def List(self, request: handoff_pb2.ListRequest, context: Any) -> handoff_pb2.ListResponse:
        return convert.list_response(self._leases.held)
