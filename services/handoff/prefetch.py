"""The reader's side of early handoffs: pulls a prompt's first blocks while its other ones are computed elsewhere."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from baton.calls import stream
from baton.engine.v1 import decode_pb2, handoff_pb2
from baton.errors import FieldViolation, InvalidRequest, LayoutMismatch, Unavailable, Unsupported
from baton.inference.v1 import timing_pb2
from rpc.timeouts import KV_TRANSFER_SECONDS
from runtime.aio import run_to_completion, run_with_background, timeout
from runtime.clock import monotonic
from services.engines.base import Engine
from services.engines.kv import Reservation, packed_ids
from services.engines.prompt import MediaSpan, Prompt
from services.engines.running.request_context import current_freed_kv
from services.handoff.peers import OwnerConnection, Peers, Pool
from services.handoff.remote_handoff import Handoff, LeasedBlocks, check_blocks, without_lease
from services.handoff.remote_lease import ReaderLease
from services.requests.bounds import require_names
from services.requests.calls import RunningCall
from services.telemetry.timings import as_seconds
from services.transports.base import Transfer, TransferFailed, Transport

_REQUIRED = ("prefill_worker_id", "prefill_address")


@dataclass(frozen=True, slots=True)
class Followed:
    """A prompt that another worker computes."""

    request_id: str
    worker_id: str
    epoch: int
    address: str


def read_followed(request: decode_pb2.PrefetchRequest) -> Followed:
    """Returns what to follow. Raises InvalidRequest naming the fields that are empty."""
    violations = [FieldViolation(name, "is empty") for name in _REQUIRED if not getattr(request, name)]
    if violations:
        raise InvalidRequest(violations)
    require_names(prefill_worker_id=request.prefill_worker_id, prefill_address=request.prefill_address)
    return Followed(request.request_id, request.prefill_worker_id, request.prefill_epoch, request.prefill_address)


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Blocks for a prompt's KV, of which the first `num_blocks` are filled. Valid once the lease is confirmed.

    Its holder owns the reservation. `early_bytes` were pulled while the prompt was computed.
    """

    reservation: Reservation
    num_blocks: int
    num_bytes: int
    early_bytes: int


class Prefetcher:
    """Pulls KV before its handoff exists, and keeps it for the decode that gets the handoff."""

    def __init__(self, engine: Engine, peers: Peers, transports: Sequence[Transport]) -> None:
        self._engine = engine
        self._peers = peers
        self._transports = transports
        self._early = {transport.name for transport in transports if transport.reads_early}
        self._running: dict[str, _Prefetch] = {}

    async def run(self, followed: Followed, prompt: Prompt, call: RunningCall) -> decode_pb2.PrefetchResponse:
        """Pulls blocks as they become final, then waits for `claim`, for at most one lease. Frees what is not taken.

        Raises Unsupported if the engine has no pool, or cannot read so early by the transport that both workers have;
        HandoffLost, StaleEpoch and LayoutMismatch as Puller.pull does, Overloaded, Unavailable if a transfer fails, and
        InvalidRequest for a wrong number of tokens.
        """
        if self._engine.memory is None:
            raise Unsupported(f"the {self._engine.facts.engine} engine reads no KV before its handoff")
        leased = without_lease(followed.worker_id, followed.epoch, followed.address)
        async with self._peers.use(leased) as peer:
            request = handoff_pb2.FollowRequest(request_id=followed.request_id, epoch=followed.epoch)
            async with aclosing(stream(peer.stub.Follow(request))) as responses:
                async for first in responses:
                    return await self._fill(first, responses, leased, peer, prompt, call)
        return decode_pb2.PrefetchResponse()

    async def claim(self, handoff: Handoff, prompt: Prompt) -> Prefetched | None:
        """Returns what was pulled of this handoff, once nothing more will be; None if that is nothing.

        The caller owns it, and has to confirm the handoff.
        """
        prefetch = self._running.get(handoff.handoff_id)
        if prefetch is None:
            return None
        await prefetch.settled.wait()
        # Without an await until the caller owns the blocks, so that a cancellation loses none.
        return prefetch.claim(handoff, prompt)

    async def _fill(
        self,
        first: handoff_pb2.FollowResponse,
        responses: AsyncIterator[handoff_pb2.FollowResponse],
        leased: LeasedBlocks,
        peer: OwnerConnection,
        prompt: Prompt,
        call: RunningCall,
    ) -> decode_pb2.PrefetchResponse:
        leased = replace(
            leased,
            handoff_id=first.handoff_id,
            lease_seconds=as_seconds(first.lease),
            layout_digest=first.layout_digest,
        )
        prefetch = _Prefetch(self._engine, leased, prompt, call)
        prefetch.check(first)
        self._running[leased.handoff_id] = prefetch
        try:
            lease = ReaderLease(leased, peer.stub)
            await run_with_background(lease.keep(), self._pull(prefetch, peer, first, responses))
            prefetch.settled.set()
            is_taken = await _happens(prefetch.taken, leased.lease_seconds)
        finally:
            del self._running[leased.handoff_id]
            await prefetch.close()
        return decode_pb2.PrefetchResponse(num_bytes=prefetch.early_bytes, is_taken=is_taken)

    async def _pull(
        self,
        prefetch: "_Prefetch",
        peer: OwnerConnection,
        first: handoff_pb2.FollowResponse,
        responses: AsyncIterator[handoff_pb2.FollowResponse],
    ) -> None:
        pool = await peer.pool(prefetch.leased, self._transports, self._engine.facts.layout)
        if pool.transport not in self._early:
            raise Unsupported(f"by {pool.transport}, KV is read once its prompt is computed")
        await prefetch.reserve()
        await prefetch.pull(first, pool)
        async for response in responses:
            await prefetch.pull(response, pool)


class _Prefetch:
    """One prompt's blocks, as far as they are pulled. `settled` once none will be pulled any more."""

    def __init__(self, engine: Engine, leased: LeasedBlocks, prompt: Prompt, call: RunningCall) -> None:
        self.leased = leased
        self.settled = asyncio.Event()
        self.taken = asyncio.Event()
        self.num_bytes = self.early_bytes = 0
        self._engine = engine
        self._prompt = prompt
        self._call = call
        self._source = packed_ids(())
        self._reservation: Reservation | None = None

    def check(self, first: handoff_pb2.FollowResponse) -> None:
        """Raises LayoutMismatch, and InvalidRequest if the prompt is not the one that is computed."""
        layout = self._engine.facts.layout
        if first.layout_digest != layout.digest:
            raise LayoutMismatch(f"the KV has layout {first.layout_digest}, the blocks here have {layout.digest}")
        if first.num_tokens != self._prompt.num_tokens:
            text = f"has {self._prompt.num_tokens} tokens; the one that is computed has {first.num_tokens}"
            raise InvalidRequest.of("prompt.token_ids", text)

    async def reserve(self) -> None:
        """Waits for blocks of this worker. Raises as Engine.reserve does."""
        self._reservation = await self._engine.reserve(self._prompt, self._prompt.num_tokens)

    async def pull(self, told: handoff_pb2.FollowResponse, pool: Pool) -> None:
        """Pulls the blocks that have become final, but those that are here. Raises Unavailable and InvalidRequest."""
        assert self._reservation is not None
        assert self._engine.memory is not None
        done = len(self._source)
        source = self._source + packed_ids(told.block_ids)
        if len(source) > len(self._reservation.block_ids):
            raise InvalidRequest.of("block_ids", f"{len(source)} are more than the prompt fills")
        check_blocks(replace(self.leased, block_ids=source), pool.shape.num_blocks)
        start = max(done, self._reservation.cached_blocks)
        if start < len(source):
            self._call.stage = timing_pb2.STAGE_HANDOFF_TRANSFER
            transfer = Transfer(
                source[start:],
                self._engine.memory,
                self._reservation.block_ids[start : len(source)],
                monotonic() + KV_TRANSFER_SECONDS,
                self.leased.handoff_id,
            )
            try:
                await pool.reader.pull(transfer)
            except TransferFailed as error:
                # Not a lease that has ended, which is expected: see optional_attempt.
                raise Unavailable(f"the KV of worker {self.leased.worker_id} did not arrive: {error}") from error
            self.num_bytes += transfer.num_bytes
            self.early_bytes += 0 if told.is_complete else transfer.num_bytes
        self._source = source
        if not done:
            await self._call.faults.inject("early")

    def claim(self, handoff: Handoff, prompt: Prompt) -> Prefetched | None:
        """Passes the blocks to the caller, if they are of this handoff and prompt and have not been passed on."""
        reservation, count = self._reservation, len(self._source)
        if reservation is None or self.taken.is_set() or not self._is_for(handoff, prompt):
            return None
        self._reservation = None
        self.taken.set()
        return Prefetched(reservation, count, self.num_bytes, self.early_bytes)

    async def close(self) -> None:
        """Frees the blocks, unless they have been taken. No transfer may still write into them."""
        reservation, self._reservation = self._reservation, None
        self.settled.set()
        if reservation is not None:
            blocks = await run_to_completion(reservation.release())
            current_freed_kv().give_back(self._prompt.num_tokens, blocks)

    def _is_for(self, handoff: Handoff, prompt: Prompt) -> bool:
        mine, count = self._prompt, len(self._source)
        return (
            (handoff.worker_id, handoff.epoch) == (self.leased.worker_id, self.leased.epoch)
            and handoff.num_tokens == mine.num_tokens
            and packed_ids(handoff.block_ids[:count]) == self._source
            and (prompt.token_ids, prompt.cache_salt, prompt.lora) == (mine.token_ids, mine.cache_salt, mine.lora)
            and [_named(span) for span in prompt.media] == [_named(span) for span in mine.media]
            and prompt.data_parallel_rank == mine.data_parallel_rank
        )


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    """True if it happens in time."""
    try:
        async with timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _named(span: MediaSpan) -> tuple[int, int, bytes]:
    return span.start, span.num_tokens, span.digest
