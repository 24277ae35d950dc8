"""Stops requests on workers, by the call ids of this router."""

from baton.calls import unary
from baton.engine.v1 import worker_pb2
from baton.errors import BatonError
from baton.inference.v1 import generate_pb2
from router.workers.handle import WorkerHandle
from rpc.channels import best_effort
from rpc.timeouts import ABORT_SECONDS


async def abort(worker: WorkerHandle, call_id: str) -> generate_pb2.CancelReceipt | None:
    """Stops a call. Returns the worker's receipt; None if there was nothing to stop, or no response in time."""
    request = worker_pb2.AbortRequest(request_id=call_id)
    try:
        answer = await unary(worker.shared_control.Abort(request, timeout=ABORT_SECONDS))
    except BatonError:
        return None
    if not answer.found:
        return None
    return generate_pb2.CancelReceipt(
        stage=answer.stage,
        worker_id=worker.record.worker_id,
        tokens_discarded=answer.tokens_discarded,
        blocks_freed=answer.blocks_freed,
        milliseconds=answer.milliseconds,
    )


async def abort_unanswered(worker: WorkerHandle, call_id: str) -> None:
    """Stops a call whose response will not be read, even during a cancellation.

    Cancelling the call stops it on the worker, too, unless the response is already on its way: the blocks that it
    names would then be held until their lease ends.
    """
    request = worker_pb2.AbortRequest(request_id=call_id)
    await best_effort(lambda seconds: worker.shared_control.Abort(request, timeout=seconds), healthy=not worker.problem)
