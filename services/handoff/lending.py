"""The owner's side of loans from the prefix cache: blocks under a lease, with their seals; and digests of handoffs."""

import asyncio

from baton.engine.v1 import handoff_pb2
from baton.errors import FieldViolation, HandoffLost, InvalidRequest, Unsupported
from rpc.auth.caller import certificate
from runtime.prefix_hash import HASH_BYTES
from services.engines.base import Engine
from services.engines.seals import BlockContents, Sealer
from services.handoff.leases import Lease, LeaseTable
from services.identity import Identity
from services.telemetry import metrics
from services.telemetry.timings import duration

# Of one loan: a million tokens in blocks of 16, in a message of 6 MB.
MOST_BLOCKS = 65536
# In the place of a request's id, for operators who list what is held.
_NAME = "prefix loan"


class Lender:
    """Lends blocks of an engine's prefix cache, and digests blocks that are held in its pool."""

    def __init__(self, engine: Engine | None, identity: Identity, leases: LeaseTable) -> None:
        self._engine = engine
        self._identity = identity
        self._leases = leases

    async def lend(self, request: handoff_pb2.LendPrefixRequest) -> tuple[Lease, list[bytes]] | None:
        """Holds the blocks for the caller, and returns the lease and their seals; None if the first one is not here.

        Raises Unsupported if the engine lends nothing, and InvalidRequest naming a wrong field.
        """
        engine, prefixes = self._engine, self._engine.prefixes if self._engine else None
        if engine is None or prefixes is None:
            raise Unsupported("this worker has no prefix cache to lend from")
        hashes, rank = tuple(request.block_hashes), request.data_parallel_rank
        _check(request, engine.facts.data_parallel_ranks)
        held = await prefixes.lend_prefix(hashes, rank)
        if held is None:
            return None
        # Without an await in between, so that a cancellation loses no blocks.
        layout = engine.facts.layout
        lease = self._leases.hold(_NAME, held, layout.digest, frozenset({certificate()} - {""}))
        try:
            digests = await self._digests(engine, lease, 0)
        except BaseException:
            self._leases.discard(lease.handoff_id)
            raise
        sealer = Sealer(layout, self._identity.epoch)
        names = [BlockContents(block_hash, layout.block_tokens) for block_hash in hashes[: len(digests)]]
        metrics.LENT_BLOCKS.inc(len(names))
        return lease, [sealer.seal(name, digest) for name, digest in zip(names, digests, strict=True)]

    async def digest(self, request: handoff_pb2.DigestBlocksRequest) -> list[int]:
        """The digests of a handoff's blocks, from one on. Raises HandoffLost unless it is held until they are there."""
        lease = self._leases.find(request.handoff_id)
        engine = self._engine
        if lease is None or engine is None or engine.memory is None:
            raise HandoffLost("no such handoff is held here")
        if lease.layout_digest != engine.facts.layout.digest:
            raise InvalidRequest.of("handoff_id", "is that of an embedding")
        return await self._digests(engine, lease, request.first_block)

    async def _digests(self, engine: Engine, lease: Lease, first_block: int) -> list[int]:
        digests = await asyncio.to_thread(engine.digest, lease.held.block_ids[first_block:])
        if self._leases.find(lease.handoff_id) is not lease:
            raise HandoffLost("the lease has ended while the blocks were digested")
        return digests


def lend_response(lent: tuple[Lease, list[bytes]] | None) -> handoff_pb2.LendPrefixResponse:
    """Converts a loan to its message; an empty one if there is none."""
    if lent is None:
        return handoff_pb2.LendPrefixResponse()
    lease, seals = lent
    return handoff_pb2.LendPrefixResponse(
        handoff_id=lease.handoff_id,
        lease=duration(lease.remaining_seconds),
        block_ids=lease.held.block_ids,
        seals=seals,
    )


def _check(request: handoff_pb2.LendPrefixRequest, ranks: int) -> None:
    hashes, violations = request.block_hashes, []
    if not 0 < len(hashes) <= MOST_BLOCKS:
        violations.append(FieldViolation("block_hashes", f"has {len(hashes)} entries; expected 1 to {MOST_BLOCKS}"))
    for index, block_hash in enumerate(hashes):
        if len(block_hash) != HASH_BYTES:
            text = f"has {len(block_hash)} bytes; expected {HASH_BYTES}"
            violations.append(FieldViolation(f"block_hashes[{index}]", text))
            break
    if request.data_parallel_rank >= ranks:
        violations.append(FieldViolation("data_parallel_rank", f"{request.data_parallel_rank} is not below {ranks}"))
    if violations:
        raise InvalidRequest(violations)
