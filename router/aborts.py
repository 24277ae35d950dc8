"""Stops requests on workers by their ids."""

import asyncio

from baton.engine.v1 import worker_pb2
from baton.inference.v1 import generate_pb2

from router.worker import Worker
from rpc.calls import unary
from rpc.errors import BatonError

_ABORT_SECONDS = 5.0
_UNANSWERED_SECONDS = 2.0
_UNANSWERED_BY_ILL_SECONDS = 0.2


async def abort(worker: Worker, request_id: str, seconds: float = _ABORT_SECONDS) -> generate_pb2.CancelReceipt | None:
    """What a worker confirms to have stopped; None if it had nothing, or could not be reached in time."""
    try:
        request = worker_pb2.AbortRequest(request_id=request_id)
        answer = await unary(worker.control.Abort(request, timeout=seconds))
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


async def abort_unanswered(worker: Worker, request_id: str) -> None:
    """Stops a call whose answer nobody waits for any more, now and in spite of a cancellation.

    The end of the call stops it on the worker too, but not if the answer was on its way already: what it names would
    then be held until its lease runs out.
    """
    # Nobody is to wait for one that hangs.
    seconds = _UNANSWERED_BY_ILL_SECONDS if worker.problem else _UNANSWERED_SECONDS
    aborting = asyncio.ensure_future(abort(worker, request_id, seconds))
    try:
        await asyncio.shield(aborting)
    except asyncio.CancelledError:
        await asyncio.wait([aborting], timeout=seconds)
        raise
