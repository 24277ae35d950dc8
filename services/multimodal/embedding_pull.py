"""The reader's side of a leased embedding: pull, then confirm that the lease still holds.

The pool of large embeddings that wait for their readers: fixed-size blocks, which other processes can map.
"""

import heapq
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from baton.errors import EmbeddingLost, HandoffLost, LayoutMismatch, Overloaded, StaleEpoch
from baton.inference.v1 import timing_pb2
from rpc.timeouts import EMBEDDING_TRANSFER_SECONDS
from rpc.tracing.span import stage_span
from runtime.aio import run_with_background
from runtime.clock import monotonic, perf_counter
from services.engines.base import ModelFacts
from services.engines.kv import BlockMemory, KvLayout
from services.engines.memory.shared_pool import OwnedBlocks, Scratch, SharedPool
from services.engines.prompt import Embedding
from services.handoff import spans as traces
from services.handoff.peers import OwnerConnection, Peers, Pool
from services.handoff.remote_handoff import LeasedBlocks, check_blocks
from services.handoff.remote_lease import ReaderLease
from services.multimodal.media_spans import GivenEmbedding
from services.telemetry import metrics
from services.telemetry.timings import Timing
from services.transports.base import Transfer, TransferFailed, Transport


@dataclass(frozen=True, slots=True)
class PulledEmbedding:
    """An embedding's bytes, confirmed, and the timing of the pull."""

    data: bytes
    timing: Timing


class EmbeddingPuller:
    """Reads embeddings from encode workers' pools. Readers do not release embeddings; the router does."""

    def __init__(self, facts: ModelFacts, peers: Peers, transports: Sequence[Transport]) -> None:
        self._facts = facts
        self._peers = peers
        self._transports = transports

    async def pull(self, given: GivenEmbedding, leased: LeasedBlocks, path: str) -> PulledEmbedding:
        """Pulls and confirms an embedding. `given` has been checked.

        Raises EmbeddingLost if the lease did not hold throughout or the bytes did not arrive, LayoutMismatch if it is
        of another model, and InvalidRequest naming a field below `path`.
        """
        async with self._peers.use(leased) as peer:
            try:
                with stage_span("embedding", {"baton.worker_id": leased.worker_id}) as span:
                    pulled = await self._pull(peer, given, leased, path)
                    metrics.observe_embedding(pulled.timing)
                    traces.moved(span, "baton.embedding", pulled.timing)
                    return pulled
            except EmbeddingLost:
                raise
            except (HandoffLost, StaleEpoch) as error:
                # The owner's process may have ended, and its pool with it.
                self._peers.forget(leased)
                raise EmbeddingLost(f"an embedding is lost: {error.message}") from error

    async def _pull(
        self, owner: OwnerConnection, given: GivenEmbedding, leased: LeasedBlocks, path: str
    ) -> PulledEmbedding:
        started = perf_counter()
        lease = ReaderLease(leased, owner.stub)
        pool, scratch = await run_with_background(lease.keep(), self._copy(owner, given, leased, path))
        # After the other renewals have stopped: this renewal is the confirmation.
        await lease.check()
        seconds = perf_counter() - started
        timing = Timing(timing_pb2.STAGE_EMBEDDING_TRANSFER, seconds, leased.num_bytes, pool.transport)
        return PulledEmbedding(scratch.take(leased.num_bytes), timing)

    async def _copy(
        self, owner: OwnerConnection, given: GivenEmbedding, leased: LeasedBlocks, path: str
    ) -> tuple[Pool, Scratch]:
        pool = await self._open(owner, given, leased)
        check_blocks(leased, pool.shape.num_blocks, path)
        scratch = Scratch(len(leased.block_ids), pool.shape.block_bytes)
        deadline = monotonic() + EMBEDDING_TRANSFER_SECONDS
        try:
            await pool.reader.pull(
                Transfer(leased.block_ids, scratch, range(scratch.num_blocks), deadline, leased.handoff_id)
            )
        except TransferFailed as error:
            raise HandoffLost(f"embeddings held by worker {leased.worker_id} did not arrive: {error}") from error
        return pool, scratch

    async def _open(self, owner: OwnerConnection, given: GivenEmbedding, leased: LeasedBlocks) -> Pool:
        assert self._facts.images is not None
        layout = self._facts.images.embedding_layout
        if (leased.layout_digest, given.dtype) != (layout.digest, layout.dtype):
            raise LayoutMismatch(
                f"the embedding of worker {leased.worker_id} has layout {leased.layout_digest}; "
                f"of this model it would be {layout.digest}"
            )
        return await owner.pool(leased, self._transports, layout)


_RETRY_SECONDS = 1.0


class EmbeddingPool:
    """Blocks of one layout, as many as fit in `pool_bytes`. A context manager: leaving closes the memory."""

    def __init__(self, layout: KvLayout, pool_bytes: int) -> None:
        self.layout = layout
        self._num_blocks = max(1, pool_bytes // layout.block_bytes)
        # Lowest ids first, so that the blocks of an embedding are neighbours and are read in one piece.
        self._free = list(range(self._num_blocks))
        self._open = ExitStack()

    def __enter__(self) -> "EmbeddingPool":
        self._memory = self._open.enter_context(SharedPool(self._num_blocks, self.layout.block_bytes))
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    @property
    def memory(self) -> BlockMemory:
        return self._memory

    @property
    def total(self) -> int:
        return self._num_blocks

    @property
    def used(self) -> int:
        return self._num_blocks - len(self._free)

    def store(self, embedding: Embedding) -> OwnedBlocks:
        """Copies an embedding into blocks. Raises Overloaded if there are not enough."""
        size = self.layout.block_bytes
        count = -(-len(embedding.data) // size)
        if count > len(self._free):
            text = f"the embedding needs {count} blocks and {len(self._free)} of {self._num_blocks} are free"
            raise Overloaded(text, retry_after_seconds=_RETRY_SECONDS)
        blocks = tuple(heapq.heappop(self._free) for _ in range(count))
        for index, block in enumerate(blocks):
            part = embedding.data[index * size : (index + 1) * size]
            self._memory.block(block)[: len(part)] = part
        return OwnedBlocks(blocks, embedding.shape[0], self.free)

    def free(self, blocks: tuple[int, ...]) -> int:
        """Frees blocks; returns how many."""
        for block in blocks:
            heapq.heappush(self._free, block)
        return len(blocks)
