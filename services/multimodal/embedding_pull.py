"""The reader's side of a leased embedding: pull, then confirm that the lease still holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import EmbeddingLost, HandoffLost, LayoutMismatch, StaleEpoch
from baton.inference.v1 import timing_pb2
from rpc.timeouts import EMBEDDING_TRANSFER_SECONDS
from rpc.tracing.span import stage_span
from runtime.aio import run_with_background
from runtime.clock import monotonic, perf_counter
from services.engines.base import ModelFacts
from services.engines.memory.scratch import Scratch
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
