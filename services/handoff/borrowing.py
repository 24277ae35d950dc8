"""The reader's side of loans: pulls the beginning of a prompt from another worker's prefix cache into the own one."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import structlog
from typing_extensions import Self

from baton.calls import unary
from baton.engine.v1 import decode_pb2, handoff_pb2, prefill_pb2
from baton.errors import BatonError, HandoffLost, InvalidReply, Overloaded, Unavailable
from baton.inference.v1 import timing_pb2
from rpc.timeouts import KV_TRANSFER_SECONDS
from rpc.tracing.span import Span, stage_span
from runtime.aio import TaskGroup, run_to_completion, run_with_background, timeout
from runtime.clock import monotonic
from services.engines.base import Engine
from services.engines.kv import Reservation, packed_ids
from services.engines.prompt import Prompt
from services.engines.running.metrics import DAMAGED_BLOCKS
from services.engines.seals import BlockContents, DamagedBlock, Sealer
from services.handoff import spans as traces
from services.handoff.lending import MOST_BLOCKS
from services.handoff.peers import OwnerConnection, Peers, Pool
from services.handoff.remote_handoff import LeasedBlocks, check_blocks, without_lease
from services.handoff.remote_lease import ReaderLease
from services.requests.bounds import are_short
from services.requests.calls import RunningCall
from services.requests.fault_injection import corrupt
from services.telemetry import metrics
from services.telemetry.timings import Timing, as_seconds
from services.transports.base import Transfer, TransferFailed, Transport

log = structlog.get_logger(__name__)

# However long computing would take, a loan that takes longer has failed.
_MOST_PATIENCE_SECONDS = 5.0
# So many damaged loans of one process, and nothing more is borrowed from it.
_MOST_DAMAGED = 3


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A worker that may have the first `num_blocks` of a prompt, and how long a loan from it may take."""

    owner: LeasedBlocks
    rank: int
    num_blocks: int
    patience_seconds: float


def read_source(request: prefill_pb2.PrefillRequest | decode_pb2.DecodeRequest) -> PrefixSource | None:
    """Returns where a request's prompt may be cached; None if it does not say. A wrong hint is no error."""
    hint = request.prefix_source
    if not (hint.address and hint.num_blocks and are_short(hint.address, hint.worker_id)):
        return None
    seconds = as_seconds(hint.patience) if hint.HasField("patience") else _MOST_PATIENCE_SECONDS
    owner = without_lease(hint.worker_id, hint.epoch, hint.address)
    patience = min(max(0.0, seconds), _MOST_PATIENCE_SECONDS)
    return PrefixSource(owner, hint.data_parallel_rank, min(hint.num_blocks, MOST_BLOCKS), patience)


class PrefixBorrower:
    """Borrows beginnings of prompts. An async context manager: leaving waits for pending releases.

    A loan never fails a request: what it does not bring is computed.
    """

    def __init__(self, engine: Engine | None, peers: Peers, transports: Sequence[Transport]) -> None:
        self._engine = engine
        self._peers = peers
        self._transports = transports
        self._turns: defaultdict[object, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting: Counter[object] = Counter()
        self._damaged: Counter[tuple[str, int]] = Counter()  # loans, by the process
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._giving_up = await self._resources.enter_async_context(TaskGroup())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._resources.aclose()

    async def borrow(self, source: PrefixSource | None, prompt: Prompt, call: RunningCall) -> None:
        """Pulls the blocks that the prefix cache lacks into it, and notes in the call's clock what came, and how long
        that took. Does nothing without a source, and in an engine that lends nothing.

        The last token of a prompt is always computed, so its block is not borrowed.
        """
        engine = self._engine
        if source is None or engine is None or engine.prefixes is None or engine.memory is None:
            return
        num_blocks = min(source.num_blocks, (prompt.num_tokens - 1) // engine.facts.layout.block_tokens)
        if num_blocks <= 0:
            return
        loan = _Loan(engine, replace(source, num_blocks=num_blocks), prompt, call)
        stage, call.stage = call.stage, timing_pb2.STAGE_PREFIX_TRANSFER
        with stage_span("prefix loan", {"baton.worker_id": source.owner.worker_id}) as span:
            outcome = await self._outcome(loan)
            call.stage = stage
            _record(loan, outcome, call, span)

    async def _outcome(self, loan: "_Loan") -> str:
        """Runs a loan, within its patience, and frees what it has not put into the cache. Returns how it ended."""
        owner = loan.source.owner
        if self._damaged[owner.worker_id, owner.epoch] >= _MOST_DAMAGED:
            return "distrusted"
        try:
            async with timeout(loan.source.patience_seconds), self._turn(loan):
                return await self._run(loan)
        except TimeoutError:
            return "late"
        except Overloaded:  # NoFreeBlocks too
            return "full"
        except BatonError as error:
            log.info("no loan of a prefix", owner=owner.worker_id, problem=error.message)
            if isinstance(error, (HandoffLost, Unavailable)):  # its process may have ended; one that refuses has not
                self._peers.forget(owner)
            return "lost"

    @asynccontextmanager
    async def _turn(self, loan: "_Loan") -> AsyncIterator[None]:
        """Lets one loan of prompts that begin alike run at a time: the next one finds what this one brings."""
        key = loan.beginning
        self._waiting[key] += 1
        try:
            async with self._turns[key]:
                yield
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key], self._turns[key]

    async def _run(self, loan: "_Loan") -> str:
        async with self._peers.use(loan.source.owner) as peer:
            try:
                if not await loan.reserve():
                    return "cached"
                pool = await peer.pool(loan.source.owner, self._transports, loan.layout)
                lease = await loan.ask(peer)
                if lease is None:
                    return "none"
                try:
                    await run_with_background(lease.keep(), loan.pull(pool))
                    # After the renewals have stopped, as for a handoff.
                    await lease.confirm()
                finally:
                    if not lease.is_over:
                        self._giving_up.create_task(self._release(loan.source.owner, lease))
                await loan.cache(pool)
                if not loan.is_damaged:
                    return "borrowed"
                self._damaged[loan.source.owner.worker_id, loan.source.owner.epoch] += 1
                return "damaged"
            finally:
                await loan.release()

    async def _release(self, owner: LeasedBlocks, lease: ReaderLease) -> None:
        async with self._peers.use(owner):
            await lease.release()


class _Loan:
    """One loan into blocks of this worker. `num_tokens` are in the cache at its end."""

    def __init__(self, engine: Engine, source: PrefixSource, prompt: Prompt, call: RunningCall) -> None:
        self.source = source
        self.layout = engine.facts.layout
        self.is_damaged = False
        self.started = monotonic()
        self.num_tokens = self.num_bytes = 0
        self.transport = ""
        self._engine = engine
        self._prompt = prompt
        self._call = call
        self._reservation: Reservation | None = None
        self._leased = source.owner
        self._seals: Sequence[bytes] = ()
        self._checked = 0

    @property
    def beginning(self) -> object:
        """Equal for prompts whose first blocks may be the same."""
        prompt = self._prompt
        return prompt.cache_salt, prompt.chain_seed, prompt.context[: self.layout.block_tokens]

    async def reserve(self) -> bool:
        """Waits for blocks of this worker; False if the cache has all of the prefix. Raises as Engine.reserve does."""
        num_blocks = self.source.num_blocks
        reserving = self._engine.reserve(self._prompt, num_blocks * self.layout.block_tokens)
        self._reservation = await reserving
        return self._reservation.cached_blocks < num_blocks

    async def ask(self, peer: OwnerConnection) -> ReaderLease | None:
        """Asks for the blocks that are not here; None if the peer lends none of them. Raises BatonError."""
        await self._call.faults.inject("borrow")
        source, owner = self.source, self.source.owner
        hashes = self._missing
        request = handoff_pb2.LendPrefixRequest(
            epoch=owner.epoch,
            layout_digest=self.layout.digest,
            data_parallel_rank=source.rank,
            block_hashes=hashes,
        )
        response = await unary(peer.stub.LendPrefix(request, timeout=source.patience_seconds))
        if not response.handoff_id:
            return None
        if not 0 < len(response.block_ids) == len(response.seals) <= len(hashes):
            raise InvalidReply("a loan has other numbers of blocks and seals than were asked for")
        self._seals = response.seals
        self._leased = replace(
            owner,
            handoff_id=response.handoff_id,
            lease_seconds=as_seconds(response.lease),
            block_ids=packed_ids(tuple(response.block_ids)),
        )
        return ReaderLease(self._leased, peer.stub)

    async def pull(self, pool: Pool) -> None:
        """Fills blocks, and checks their seals. Raises HandoffLost, and InvalidRequest for blocks that do not exist."""
        await self._call.faults.inject("lent")
        memory, leased, destination = self._engine.memory, self._leased, self._destination
        assert memory is not None
        check_blocks(leased, pool.shape.num_blocks)
        transfer = Transfer(leased.block_ids, memory, destination, monotonic() + KV_TRANSFER_SECONDS, leased.handoff_id)
        try:
            await pool.reader.pull(transfer)
        except TransferFailed as error:
            raise HandoffLost(f"the KV of worker {leased.worker_id} did not arrive: {error}") from error
        if self._call.faults.has("corrupt", "lent"):
            corrupt(memory, destination)
        self._checked, damage = await asyncio.to_thread(self._intact, destination, self._missing)
        if damage is not None:
            self._record_damage(damage)
        await self._call.faults.inject("borrowed")

    async def cache(self, pool: Pool) -> None:
        """Puts the blocks whose seals are right into the prefix cache."""
        reservation, self._reservation = self._reservation, None
        assert reservation is not None
        # Before the wait: what begins is done, even if the patience ends meanwhile.
        self.num_tokens = self._checked * self.layout.block_tokens
        self.num_bytes = self._checked * self.layout.block_bytes
        self.transport = pool.transport
        await run_to_completion(reservation.cache(reservation.cached_blocks + self._checked))

    async def release(self) -> None:
        """Frees the blocks, unless they are in the cache. No transfer may still write into them."""
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            await run_to_completion(reservation.release())

    @property
    def _missing(self) -> Sequence[bytes]:
        assert self._reservation is not None
        return self._reservation.block_hashes[self._reservation.cached_blocks :]

    @property
    def _destination(self) -> Sequence[int]:
        assert self._reservation is not None
        first = self._reservation.cached_blocks
        return self._reservation.block_ids[first : first + len(self._leased.block_ids)]

    def _intact(self, destination: Sequence[int], names: Sequence[bytes]) -> tuple[int, DamagedBlock | None]:
        """The number of blocks, from the first on, that are what their names say, and what ends them. Blocking."""
        sealer, digests = Sealer(self.layout, self.source.owner.epoch), self._engine.digest(destination)
        for index, (seal, name, digest) in enumerate(zip(self._seals, names, digests, strict=False)):
            try:
                sealer.check(seal, BlockContents(name, self.layout.block_tokens), digest)
            except DamagedBlock as damage:
                return index, damage
        return len(digests), None

    def _record_damage(self, damage: DamagedBlock) -> None:
        self.is_damaged = True
        DAMAGED_BLOCKS.labels("peer").inc()
        log.warning(
            "kv block is damaged", tier="peer", owner=self.source.owner.worker_id, reason=f"{damage} of a block"
        )


def _record(loan: _Loan, outcome: str, call: RunningCall, span: Span) -> None:
    seconds = monotonic() - loan.started
    timing = Timing(timing_pb2.STAGE_PREFIX_TRANSFER, seconds, loan.num_bytes, loan.transport)
    call.clock.borrowed(timing, loan.num_tokens, peer_has_none=outcome == "none")
    metrics.PREFIX_LOANS.labels(outcome).inc()
    span.set({"baton.prefix_loan.outcome": outcome, "baton.prefix_loan.tokens": loan.num_tokens})
    if loan.num_bytes:
        metrics.PREFIX_LOAN_SECONDS.labels(loan.transport).observe(seconds)
        metrics.PREFIX_LOAN_BYTES.labels(loan.transport).inc(loan.num_bytes)
        traces.moved(span, "baton.prefix_loan", timing)
