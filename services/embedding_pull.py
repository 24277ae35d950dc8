"""The reader's side of a leased embedding: pull, then confirm that the lease still holds."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.inference.v1 import timing_pb2

from rpc.errors import BatonError, EmbeddingLost, HandoffLost, LayoutMismatch, StaleEpoch
from rpc.settle import do_while
from rpc.tracing.span import stage_span
from services import metrics, traces
from services.engine import ModelFacts
from services.engines.scratch import Scratch
from services.handoffs import LeasedBlocks, Timing, check_blocks
from services.peers import Peer, Peers, Pool
from services.remote_lease import RemoteLease
from services.spans import GivenEmbedding
from services.transports.transport import Transfer, TransferFailed, Transport

_TRANSFER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class PulledEmbedding:
    """An embedding's bytes, confirmed, and what it took to have them here."""

    data: bytes
    timing: Timing


class EmbeddingPuller:
    """Reads embeddings from encode workers' pools. Whoever asked for an embedding releases it, not its readers."""

    def __init__(self, facts: ModelFacts, peers: Peers, transports: Sequence[Transport]) -> None:
        self._facts = facts
        self._peers = peers
        self._transports = transports

    async def pull(self, given: GivenEmbedding, leased: LeasedBlocks, path: str) -> PulledEmbedding:
        """The embedding. `given` has been checked.

        Raises EmbeddingLost if the lease did not hold throughout or the bytes cannot be had, LayoutMismatch if it is of
        another model, and InvalidRequest naming a field below `path`.
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
                # Its process may be gone, and its pool with it.
                self._peers.forget(leased)
                raise EmbeddingLost(f"an embedding is lost: {error.message}") from error

    async def _pull(self, peer: Peer, given: GivenEmbedding, leased: LeasedBlocks, path: str) -> PulledEmbedding:
        started = time.perf_counter()
        lease = RemoteLease(leased, peer.stub)
        pool, scratch = await do_while(lease.keep(), self._copy(peer, given, leased, path))
        # Not while renewing: this renewal is the one that counts.
        await lease.confirm_and_leave()
        seconds = time.perf_counter() - started
        timing = Timing(timing_pb2.STAGE_EMBEDDING_TRANSFER, seconds, leased.num_bytes, pool.transport)
        return PulledEmbedding(scratch.take(leased.num_bytes), timing)

    async def _copy(self, peer: Peer, given: GivenEmbedding, leased: LeasedBlocks, path: str) -> tuple[Pool, Scratch]:
        pool = await self._open(peer, given, leased)
        check_blocks(leased, pool.num_blocks, path)
        scratch = Scratch(len(leased.block_ids), pool.block_bytes)
        deadline = time.monotonic() + _TRANSFER_SECONDS
        try:
            await pool.reader.pull(Transfer(leased.block_ids, scratch, range(scratch.num_blocks), deadline))
        except TransferFailed as error:
            raise HandoffLost(f"what worker {leased.worker_id} holds did not arrive: {error}") from error
        return pool, scratch

    async def _open(self, peer: Peer, given: GivenEmbedding, leased: LeasedBlocks) -> Pool:
        assert self._facts.images is not None
        layout = self._facts.images.embedding_layout
        if (leased.layout_digest, given.dtype) != (layout.digest, layout.dtype):
            raise LayoutMismatch(
                f"the embedding of worker {leased.worker_id} has layout {leased.layout_digest}; "
                f"of this model it would be {layout.digest}"
            )
        try:
            return await peer.pool(leased, self._transports, layout)
        except (StaleEpoch, LayoutMismatch, HandoffLost):
            raise
        except BatonError as error:
            raise HandoffLost(
                f"worker {leased.worker_id} does not say how to read its pool: {error.message}"
            ) from error
