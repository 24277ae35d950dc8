"""Loans of prefixes between workers, as a request's calls ask for them and tell of them."""

from baton.engine.v1 import handoff_pb2
from router.routing.policy import Placement, Progress
from router.workers.handle import WorkerHandle

# A loan that takes no longer than this is never late.
_LEAST_PATIENCE_SECONDS = 0.05


def prefix_source(placement: Placement[WorkerHandle], worker: WorkerHandle) -> handoff_pb2.PrefixSource | None:
    """Where this worker is to pull the beginning of the prompt from; None if it is to compute it, or not to run it."""
    prediction = placement.prediction
    if prediction is None or prediction.load.peer is None or prediction.runs_on is not worker:
        return None
    peer = prediction.load.peer
    source = handoff_pb2.PrefixSource(
        worker_id=peer.record.worker_id,
        epoch=peer.record.epoch,
        address=peer.record.address,
        data_parallel_rank=peer.rank,
        num_blocks=peer.num_blocks,
    )
    source.patience.FromNanoseconds(int(max(_LEAST_PATIENCE_SECONDS, peer.saved_seconds) * 1e9))
    return source


def report_loan(progress: Progress, usage: handoff_pb2.PromptUsage) -> None:
    """Tells the policy what a loan has brought, if one was asked for. Wrong values are cut."""
    if usage.HasField("peer_seconds"):
        tokens = min(usage.peer_cached_tokens, usage.cached_tokens)
        progress.borrowed(tokens, max(0.0, usage.peer_seconds.seconds + usage.peer_seconds.nanos / 1e9))
    if usage.peer_has_none:
        progress.peer_has_none()
