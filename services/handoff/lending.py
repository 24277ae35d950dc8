"""The owner's side of loans from the prefix cache: blocks under a lease, with their seals; and digests of handoffs."""

import asyncio
from collections.abc import Sequence

from baton.engine.v1 import handoff_pb2
from baton.errors import FieldViolation, HandoffLost, InvalidRequest, Overloaded, Unsupported
from engine_protocol.prefix_hash import HASH_BYTES
from rpc.auth.caller import certificate
from runtime.aio import run_to_completion
from services.engines.base import Engine, LendsPrefixes
from services.engines.seals import BlockContents, Sealer
from services.handoff.leases import Lease, LeaseTable
from services.identity import Identity
from services.telemetry import metrics
from services.telemetry.timings import duration

# Of one loan: a million tokens in blocks of 16, in an answer of 6 MB. Servers take 65,536 fields in a message.
MOST_BLOCKS = 62_500
# Of one worker at a time, held or asked for. A borrower has one for each prompt that it begins.
MOST_LOANS = 256
_RETRY_SECONDS = 1.0
# A borrower computes what has not come after five seconds: one that renews for longer reads nothing.
_RENEWABLE_SECONDS = 30.0
# So many loans, and so many handoffs, are digested at once: each keeps a thread busy for up to a second for each GB.
_DIGESTED_AT_ONCE = 2
# In the place of a request's id, for operators who list what is held.
_NAME = "prefix loan"


class Lender:
    """Lends blocks of an engine's prefix cache, and digests blocks that are held in its pool."""

    def __init__(self, engine: Engine | None, identity: Identity, leases: LeaseTable) -> None:
        self._engine = engine
        self._identity = identity
        self._leases = leases
        self._asked = 0
        self._lending, self._comparing = (asyncio.Semaphore(_DIGESTED_AT_ONCE) for _ in range(2))

    async def lend(self, request: handoff_pb2.LendPrefixRequest) -> tuple[Lease, list[bytes]] | None:
        """Holds the blocks for the caller, and returns the lease and their seals; None if the first one is not here.

        Raises Unsupported if the engine lends nothing, InvalidRequest naming a wrong field, and Overloaded.
        """
        engine = self._engine
        if engine is None or engine.prefixes is None:
            raise Unsupported("this worker has no prefix cache to lend from")
        hashes, rank = tuple(request.block_hashes), request.data_parallel_rank
        _check(hashes, rank, engine.facts.data_parallel_ranks)
        loans = self._asked + len(self._leases.of(_NAME))
        if loans >= MOST_LOANS:
            raise Overloaded(f"{loans} loans are held or asked for already", retry_after_seconds=_RETRY_SECONDS)
        self._asked += 1
        try:
            async with self._lending:
                return await self._lend(engine, engine.prefixes, hashes, rank)
        finally:
            self._asked -= 1

    async def _lend(
        self, engine: Engine, prefixes: LendsPrefixes, hashes: Sequence[bytes], rank: int
    ) -> tuple[Lease, list[bytes]] | None:
        held = await prefixes.lend_prefix(hashes, rank)
        if held is None:
            return None
        # Without an await in between, so that a cancellation loses no blocks.
        holders = frozenset({certificate()} - {""})
        lease = self._leases.hold(_NAME, held, engine.facts.layout.digest, holders, _RENEWABLE_SECONDS)
        try:
            # Until the thread has ended: only so many are busy, and they read nothing that was freed.
            sealing = asyncio.to_thread(_sealed, engine, held.block_ids, hashes, self._identity.epoch)
            seals = await run_to_completion(sealing)
            self._require(lease)
        except BaseException:
            self._leases.discard(lease.handoff_id)
            raise
        metrics.LENT_BLOCKS.inc(len(seals))
        return lease, seals

    async def digest(self, request: handoff_pb2.DigestBlocksRequest) -> list[int]:
        """The digests of a handoff's blocks, from one on. Raises HandoffLost unless it is held until they are there."""
        lease = self._leases.find(request.handoff_id)
        engine = self._engine
        if lease is None or engine is None or engine.memory is None:
            raise HandoffLost("no such handoff is held here")
        if lease.layout_digest != engine.facts.layout.digest:
            raise InvalidRequest.of("handoff_id", "is that of an embedding")
        async with self._comparing:
            digesting = asyncio.to_thread(engine.digest, lease.held.block_ids[request.first_block :])
            digests = await run_to_completion(digesting)
        self._require(lease)
        return digests

    def _require(self, lease: Lease) -> None:
        if self._leases.find(lease.handoff_id) is not lease:
            raise HandoffLost("the lease has ended while the blocks were digested")


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


def _sealed(engine: Engine, block_ids: Sequence[int], hashes: Sequence[bytes], epoch: int) -> list[bytes]:
    """The seals of blocks with these names. Blocking."""
    layout = engine.facts.layout
    sealer = Sealer(layout, epoch)
    # The last names may be those of blocks that are not here.
    named = zip(hashes, engine.digest(block_ids), strict=False)
    return [sealer.seal(BlockContents(block_hash, layout.block_tokens), digest) for block_hash, digest in named]


def _check(hashes: Sequence[bytes], rank: int, ranks: int) -> None:
    violations = []
    if not 0 < len(hashes) <= MOST_BLOCKS:
        violations.append(FieldViolation("block_hashes", f"has {len(hashes)} entries; expected 1 to {MOST_BLOCKS}"))
    elif set(map(len, hashes)) != {HASH_BYTES} or len(set(hashes)) < len(hashes):
        violations.append(_first_wrong(hashes))
    if rank >= ranks:
        violations.append(FieldViolation("data_parallel_rank", f"{rank} is not below {ranks}"))
    if violations:
        raise InvalidRequest(violations)


def _first_wrong(hashes: Sequence[bytes]) -> FieldViolation:
    seen: set[bytes] = set()
    for index, block_hash in enumerate(hashes):
        path = f"block_hashes[{index}]"
        if len(block_hash) != HASH_BYTES:
            return FieldViolation(path, f"has {len(block_hash)} bytes; expected {HASH_BYTES}")
        if block_hash in seen:
            return FieldViolation(path, "is given twice")
        seen.add(block_hash)
    raise AssertionError("none is wrong")
