"""The decode side of a handoff: reserve, pull, confirm. Nothing is ever computed from KV that was not confirmed."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType

from baton.inference.v1 import timing_pb2
from typing_extensions import Self

from rpc.aio import TaskGroup
from rpc.errors import BatonError, HandoffLost, LayoutMismatch, Overloaded, StaleEpoch
from rpc.settle import do_while, finish
from rpc.tracing.span import stage_span
from services import metrics, traces
from services.calls import Call
from services.engine import Engine
from services.faults import corrupt
from services.footprint import current_footprint
from services.handoffs import Handoff, Timing, check_blocks, check_handoff
from services.kv import PulledKv, Reservation
from services.peers import Peer, Peers, Pool
from services.prompt import Prompt
from services.remote_lease import RemoteLease
from services.transports.transport import Transfer, TransferFailed, Transport

# A pull of the largest prompts takes a second; one that takes this long will not come to an end.
_TRANSFER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Pulled:
    """KV that is here and confirmed, and what that took."""

    kv: PulledKv
    timings: tuple[Timing, ...]


class Puller:
    """Takes handoffs over. An async context manager: leaving waits for the releases that are on their way."""

    def __init__(self, engine: Engine, peers: Peers, transports: Sequence[Transport]) -> None:
        self._engine = engine
        self._peers = peers
        self._transports = transports

    async def __aenter__(self) -> Self:
        self._giving_up = await TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._giving_up.__aexit__(None, None, None)

    @asynccontextmanager
    async def pull(self, handoff: Handoff, prompt: Prompt, call: Call) -> AsyncIterator[Pulled]:
        """Pulled and confirmed KV. Its blocks are given back at the end, unless a decode took them over.

        Raises InvalidRequest naming the field of a handoff that cannot be right, LayoutMismatch, StaleEpoch, and
        HandoffLost if the lease did not hold throughout or the bytes cannot be had. Whatever it raises, and if it is
        cancelled, the handoff is released at once where that is possible; except for Overloaded, since another worker
        may have room for it.
        """
        async with self._peers.use(handoff) as peer:
            lease = RemoteLease(handoff, peer.stub)
            attempt = _Attempt(self._engine, handoff, prompt, call)
            try:
                with ExitStack() as undo:
                    undo.callback(self._give_up, handoff, lease)
                    check_handoff(handoff, prompt, self._engine.facts.layout)
                    try:
                        with stage_span("handoff", {"baton.handoff.confirmed": False}) as span:
                            await do_while(lease.keep(), self._transfer(attempt, peer))
                            # Not while renewing: a renewal that the owner sees after the release denies the lease.
                            pulled = await attempt.confirm(lease)
                            metrics.observe_handoff(pulled.timings)
                            traces.taken_over(span, handoff, pulled.timings)
                    except Overloaded:
                        undo.pop_all()
                        raise
                    except HandoffLost:
                        # Its process may be gone, and its pool with it.
                        self._peers.forget(handoff)
                        raise
                    undo.pop_all()
                yield pulled
            finally:
                await attempt.release()

    async def _transfer(self, attempt: "_Attempt", peer: Peer) -> None:
        pool = await self._open(attempt.handoff, peer)
        check_blocks(attempt.handoff, pool.num_blocks)
        await attempt.transfer(pool)

    async def _open(self, handoff: Handoff, peer: Peer) -> Pool:
        try:
            return await peer.pool(handoff, self._transports, self._engine.facts.layout)
        except (StaleEpoch, LayoutMismatch, HandoffLost):
            raise
        except BatonError as error:
            raise HandoffLost(
                f"worker {handoff.worker_id} does not say how to read its pool: {error.message}"
            ) from error

    def _give_up(self, handoff: Handoff, lease: RemoteLease) -> None:
        if not lease.over:
            self._giving_up.create_task(self._release(handoff, lease))

    async def _release(self, handoff: Handoff, lease: RemoteLease) -> None:
        async with self._peers.use(handoff):
            await lease.give_up()


class _Attempt:
    """One handoff on its way into this worker's pool."""

    def __init__(self, engine: Engine, handoff: Handoff, prompt: Prompt, call: Call) -> None:
        self.handoff = handoff
        self._engine = engine
        self._prompt = prompt
        self._call = call
        self._reservation: Reservation | None = None
        self._started = time.monotonic()
        self._reserved_at = self._started
        self._num_bytes = 0
        self._transport = ""

    async def transfer(self, pool: Pool) -> None:
        """Waits for blocks of this worker's, and fills them. What they hold is worthless until it is confirmed."""
        self._call.stage = timing_pb2.STAGE_HANDOFF_WAIT
        await self._call.faults.strike("reserve")
        self._reservation = await self._engine.reserve(self._prompt, self.handoff.num_tokens)
        self._reserved_at = time.monotonic()
        self._call.stage = timing_pb2.STAGE_HANDOFF_TRANSFER
        await self._call.faults.strike("pull")
        self._num_bytes = await self._copy(pool, self._reservation)
        self._transport = pool.transport if self._num_bytes else ""

    async def confirm(self, lease: RemoteLease) -> Pulled:
        """Ends the lease, which makes the blocks' content good. Raises HandoffLost or StaleEpoch if it is not."""
        assert self._reservation is not None
        await lease.confirm()
        await self._call.faults.strike("confirm")
        self._call.stage = timing_pb2.STAGE_DECODE
        waiting = Timing(timing_pb2.STAGE_HANDOFF_WAIT, self._reserved_at - self._started)
        seconds = time.monotonic() - self._reserved_at
        moving = Timing(timing_pb2.STAGE_HANDOFF_TRANSFER, seconds, self._num_bytes, self._transport)
        return Pulled(PulledKv(self._prompt, self._reservation), (waiting, moving))

    async def release(self) -> None:
        """Gives the blocks back, unless a decode has taken them over. No transfer writes into them any more."""
        if self._reservation is not None:
            blocks = await finish(self._reservation.release())
            current_footprint().give_back(self.handoff.num_tokens, blocks)

    async def _copy(self, pool: Pool, reservation: Reservation) -> int:
        cached = reservation.cached_blocks
        missing = self.handoff.block_ids[cached:]
        if not missing:
            return 0
        deadline = time.monotonic() + _TRANSFER_SECONDS
        transfer = Transfer(missing, self._engine.memory, reservation.block_ids[cached:], deadline)
        try:
            await pool.reader.pull(transfer)
        except TransferFailed as error:
            raise HandoffLost(f"the KV of worker {self.handoff.worker_id} did not arrive: {error}") from error
        if self._call.faults.has("corrupt", "pull"):
            corrupt(self._engine.memory, reservation.block_ids[cached:])
        return transfer.num_bytes
