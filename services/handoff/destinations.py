"""The decode side of engines that allocate before the prompt is computed: blocks under a lease, until a decode."""

from dataclasses import dataclass
from typing import Any

from baton.engine.v1 import decode_pb2, handoff_pb2
from baton.errors import HandoffLost, Unsupported
from rpc.auth.caller import certificate
from services.engines.base import Engine
from services.engines.kv_transfer import AllocatesFirst, EngineDestination
from services.engines.prompt import Prompt, Sampling
from services.handoff.leases import LeaseTable
from services.handoff.service import release_if_undelivered
from services.identity import Identity
from services.requests.loras import require_lora, using_lora
from services.requests.prompts import check_limits
from services.telemetry.timings import duration


@dataclass(frozen=True, slots=True)
class AllocatedBlocks:
    """The blocks that the lease table holds for a destination. There is no KV in them yet."""

    destination: EngineDestination
    num_tokens: int = 0

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self.destination.block_ids

    async def release(self) -> int:
        return await self.destination.release()


class Allocator:
    """Allocates for requests, and hands what it allocated to their decodes."""

    def __init__(self, engine: Engine, identity: Identity, leases: LeaseTable) -> None:
        self._engine = engine
        self._identity = identity
        self._leases = leases

    async def allocate(
        self, request: decode_pb2.AllocateRequest, prompt: Prompt, sampling: Sampling, context: Any
    ) -> decode_pb2.AllocateResponse:
        """Allocates, and holds the blocks under a lease; releases them if the caller is gone before the response.

        Raises Unsupported if the engine allocates when it decodes, and what AllocatesFirst.allocate raises.
        """
        transfer, facts = self._engine.kv_transfer, self._engine.facts
        if not isinstance(transfer, AllocatesFirst):
            raise Unsupported(f"the {facts.engine} engine allocates when it decodes")
        await check_limits(facts, prompt, sampling)
        require_lora(self._engine, prompt)
        holders = frozenset({certificate()} - {""})
        async with using_lora(self._engine, prompt):
            destination = await transfer.allocate(prompt, sampling, request.prefill_address)
            # Without an await in between, so that a cancellation loses no blocks.
            held = AllocatedBlocks(destination)
            lease = self._leases.hold(request.request_id, held, facts.layout.digest, holders)
            release_if_undelivered(context, [lease.handoff_id], self._leases)
        message = handoff_pb2.KvDestination(
            destination_id=lease.handoff_id,
            epoch=self._identity.epoch,
            lease=duration(lease.remaining_seconds),
            engine_state=destination.engine_state,
        )
        return decode_pb2.AllocateResponse(destination=message)

    def take(self, destination_id: str, request_id: str) -> EngineDestination:
        """Ends the lease and passes the blocks to the caller. Raises HandoffLost if it is not held for this request."""
        lease = self._leases.find(destination_id)
        if lease is None or lease.request_id != request_id or not isinstance(lease.held, AllocatedBlocks):
            raise HandoffLost("the blocks allocated for the request are no longer held")
        self._leases.surrender(lease)
        return lease.held.destination
