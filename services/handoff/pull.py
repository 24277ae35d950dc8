"""The reader's side of a handoff: reserve, pull, confirm. Unconfirmed KV is never used."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog
from typing_extensions import Self

from baton.calls import unary
from baton.engine.v1 import handoff_pb2
from baton.errors import BatonError, HandoffLost, Overloaded, StaleEpoch
from baton.inference.v1 import timing_pb2
from rpc.timeouts import KV_TRANSFER_SECONDS
from rpc.tracing.span import current_span, stage_span
from runtime.aio import TaskGroup, run_to_completion, run_with_background, wait_until_done
from runtime.clock import monotonic
from services.engines.base import Engine
from services.engines.kv import NoFreeBlocks, PulledKv, Reservation
from services.engines.prompt import Prompt
from services.engines.running.request_context import current_freed_kv
from services.handoff import spans as traces
from services.handoff.peers import OwnerConnection, Peers, Pool
from services.handoff.prefetch import Prefetched, Prefetcher
from services.handoff.remote_handoff import Handoff, check_blocks, check_handoff
from services.handoff.remote_lease import ReaderLease
from services.requests.calls import RunningCall
from services.requests.fault_injection import corrupt
from services.telemetry import metrics
from services.telemetry.timings import Timing
from services.transports.base import Transfer, TransferFailed, Transport

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pulled:
    """KV that was pulled and confirmed, and the timings of that."""

    kv: PulledKv
    timings: tuple[Timing, ...]


class Puller:
    """Pulls handoffs. An async context manager: leaving waits for pending releases."""

    def __init__(self, engine: Engine, peers: Peers, transports: Sequence[Transport], check_every: int = 0) -> None:
        """The content of one handoff in `check_every` is compared with its owner's; of none if that is 0."""
        self._check_every = check_every
        self._num_pulled = 0
        self.prefetcher = Prefetcher(engine, peers, transports)
        self._engine = engine
        self._peers = peers
        self._transports = transports
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._giving_up = await self._resources.enter_async_context(TaskGroup())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._resources.aclose()

    @asynccontextmanager
    async def pull(self, handoff: Handoff, prompt: Prompt, call: RunningCall) -> AsyncIterator[Pulled]:
        """Yields pulled and confirmed KV. Frees its blocks at the end, unless a decode has taken them over.

        Raises InvalidRequest naming a wrong field of the handoff, LayoutMismatch, StaleEpoch, and HandoffLost if the
        lease did not hold throughout, the bytes did not arrive, or KV that is held here left no room for them. After
        any error, and on cancellation, it releases the handoff at once if the owner answers. Overloaded, and what a
        decode has yielded, are the exceptions: another worker may have room for the handoff.
        """
        async with self._peers.use(handoff) as peer:
            lease = ReaderLease(handoff, peer.stub)
            attempt = _Attempt(self._engine, self.prefetcher, handoff, prompt, call)
            try:
                with ExitStack() as undo:
                    if not handoff.is_yielded:
                        undo.callback(self._give_up, handoff, lease)
                    check_handoff(handoff, prompt, self._engine.facts.layout)
                    try:
                        with stage_span("handoff", {"baton.handoff.confirmed": False}) as span:
                            await run_with_background(lease.keep(), self._transfer(attempt, peer))
                            # Confirm after the renewals have stopped: a renewal that arrives after the release would
                            # fail the lease.
                            pulled = await attempt.confirm(lease)
                            metrics.observe_handoff(pulled.timings)
                            traces.record_taken_over(span, handoff, pulled.timings)
                    except NoFreeBlocks as error:
                        # The owner may be waiting for this worker's blocks: release the handoff at once.
                        metrics.HANDOFFS_GIVEN_BACK.inc()
                        raise HandoffLost(f"the handoff was released: {error.message}") from error
                    except Overloaded:
                        undo.pop_all()
                        raise
                    except HandoffLost:
                        # The owner's process may have ended, and its pool with it.
                        self._peers.forget(handoff)
                        raise
                    undo.pop_all()
                yield pulled
            finally:
                await attempt.release()

    async def _transfer(self, attempt: "_Attempt", peer: OwnerConnection) -> None:
        pool = await peer.pool(attempt.handoff, self._transports, self._engine.facts.layout)
        check_blocks(attempt.handoff, pool.shape.num_blocks)
        await attempt.transfer(pool)
        self._num_pulled += 1
        if self._check_every and self._num_pulled % self._check_every == 0:
            await attempt.check(peer)

    def _give_up(self, handoff: Handoff, lease: ReaderLease) -> None:
        if not lease.is_over:
            self._giving_up.create_task(self._release(handoff, lease))

    async def _release(self, handoff: Handoff, lease: ReaderLease) -> None:
        async with self._peers.use(handoff):
            await lease.release()


class _Attempt:
    """The transfer of one handoff into this worker's pool."""

    def __init__(
        self, engine: Engine, prefetcher: Prefetcher, handoff: Handoff, prompt: Prompt, call: RunningCall
    ) -> None:
        self.handoff = handoff
        self._engine = engine
        self._prefetcher = prefetcher
        self._prompt = prompt
        self._call = call
        self._reservation: Reservation | None = None
        self._prefetched: Prefetched | None = None
        self._started = monotonic()
        self._reserved_at = self._started
        self._num_bytes = 0
        self._transport = ""

    async def transfer(self, pool: Pool) -> None:
        """Waits for blocks of this worker, and fills them. Their content is not valid before `confirm`."""
        self._call.stage = timing_pb2.STAGE_HANDOFF_WAIT
        await self._call.faults.inject("reserve")
        self._prefetched = await self._prefetcher.claim(self.handoff, self._prompt)
        if self._prefetched is not None:
            self._reservation = self._prefetched.reservation
        else:
            self._reservation = await self._engine.reserve(self._prompt, self.handoff.num_tokens)
        self._reserved_at = monotonic()
        self._call.stage = timing_pb2.STAGE_HANDOFF_TRANSFER
        await self._call.faults.inject("pull")
        early = self._prefetched
        self._num_bytes = await self._copy(pool, self._reservation) + (early.num_bytes if early else 0)
        self._transport = pool.transport if self._num_bytes else ""

    async def check(self, peer: OwnerConnection) -> None:
        """Compares what was pulled with what the owner has. Raises HandoffLost if it differs, or cannot be compared."""
        assert self._reservation is not None
        first = self._reservation.cached_blocks
        here = self._reservation.block_ids[first:]
        handoff = self.handoff
        request = handoff_pb2.DigestBlocksRequest(handoff_id=handoff.handoff_id, epoch=handoff.epoch, first_block=first)
        digesting = asyncio.ensure_future(asyncio.to_thread(self._engine.digest, here))
        try:
            answer = await unary(peer.stub.DigestBlocks(request, timeout=KV_TRANSFER_SECONDS))
        except StaleEpoch:
            raise
        except BatonError as error:
            text = f"the KV of worker {handoff.worker_id} cannot be checked: {error.message}"
            raise HandoffLost(text) from error
        finally:
            await wait_until_done(digesting)
        is_equal = digesting.result() == list(answer.digests)
        metrics.HANDOFF_CHECKS.labels("equal" if is_equal else "damaged").inc()
        current_span().set({"baton.handoff.checked": True, "baton.handoff.damaged": not is_equal})
        if not is_equal:
            log.warning("handoff is damaged", owner=handoff.worker_id, blocks=len(here))
            raise HandoffLost(f"the KV of worker {handoff.worker_id} did not arrive as it was sent")

    async def confirm(self, lease: ReaderLease) -> Pulled:
        """Ends the lease, which makes the blocks' content valid. Raises HandoffLost or StaleEpoch if the lease did not
        hold.
        """
        assert self._reservation is not None
        await lease.confirm()
        await self._call.faults.inject("confirm")
        self._call.stage = timing_pb2.STAGE_DECODE
        waiting = Timing(timing_pb2.STAGE_HANDOFF_WAIT, self._reserved_at - self._started)
        seconds = monotonic() - self._reserved_at
        cached = self._reservation.cached_blocks * self._engine.facts.layout.block_bytes
        early = self._prefetched.early_bytes if self._prefetched else 0
        moving = Timing(timing_pb2.STAGE_HANDOFF_TRANSFER, seconds, self._num_bytes, self._transport, cached, early)
        return Pulled(PulledKv(self._prompt, self._reservation), (waiting, moving))

    async def release(self) -> None:
        """Frees the blocks, unless a decode has taken them over. No transfer may still write into them."""
        if self._reservation is not None:
            blocks = await run_to_completion(self._reservation.release())
            current_freed_kv().give_back(self.handoff.num_tokens, blocks)

    async def _copy(self, pool: Pool, reservation: Reservation) -> int:
        here = max(reservation.cached_blocks, self._prefetched.num_blocks if self._prefetched else 0)
        missing = self.handoff.block_ids[here:]
        if not missing:
            return 0
        memory = self._engine.memory
        assert memory is not None  # without a pool the engine grants no reservation
        deadline = monotonic() + KV_TRANSFER_SECONDS
        transfer = Transfer(missing, memory, reservation.block_ids[here:], deadline, self.handoff.handoff_id)
        try:
            await pool.reader.pull(transfer)
        except TransferFailed as error:
            raise HandoffLost(f"the KV of worker {self.handoff.worker_id} did not arrive: {error}") from error
        if self._call.faults.has("corrupt", "pull"):
            corrupt(memory, reservation.block_ids[here:])
        return transfer.num_bytes
