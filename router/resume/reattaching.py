"""A kept decode whose worker's process was lost: it goes on in the worker's next process, which has its ids and KV."""

from typing import Any

from baton.engine.v1 import decode_pb2
from baton.errors import BatonError, Draining, InvalidReply, LoraNotHere, NoWorker, Unavailable
from discovery.record import TAKES_OVER
from router.decoding.state import ExecutionState
from router.resume.attaching import first_of
from router.resume.record import owner_of
from router.telemetry import metrics
from router.workers.calls import AdoptedDecode
from router.workers.handle import WorkerHandle
from router.workers.replies import check_attached
from runtime.aio import timeout


async def reattach(state: ExecutionState, lost: WorkerHandle, error: BatonError) -> AdoptedDecode | None:
    """The decode in the next process of the worker that was lost by `error`; None if it does not go on there.

    The caller owns its call. What the lost process had told of it is all there, but perhaps more.
    """
    if not _may_go_on(lost, error):
        return None
    emitted = len(state.completion.token_ids)
    try:
        async with timeout(min(_patience(state), state.ctx.deadline.remaining_seconds)):
            worker = await state.placer.await_next_process(lost.record)
            adopted = await _attach(state, worker, emitted)
    except (TimeoutError, BatonError):
        metrics.REATTACHMENTS.labels("lost").inc()
        return None
    metrics.REATTACHMENTS.labels("attached").inc()
    return adopted


def _may_go_on(lost: WorkerHandle, error: BatonError) -> bool:
    is_loss = isinstance(error, Unavailable) and not isinstance(error, (Draining, LoraNotHere, NoWorker))
    return is_loss and TAKES_OVER in lost.record.capabilities


def _patience(state: ExecutionState) -> float:
    """The time to wait: where no other worker can continue, as long as for one."""
    seconds, tried = state.retries.reattach_seconds, state.attempts.tried if state.attempts else frozenset[str]()
    if not seconds or state.placer.can_decode(state.routing_request, state.context_tokens, tried):
        return seconds
    return max(seconds, state.retries.wait_seconds)


async def _attach(state: ExecutionState, worker: WorkerHandle, emitted: int) -> AdoptedDecode:
    keep = state.ctx.keep
    assert keep is not None
    asked = decode_pb2.AttachRequest(
        request_id=state.ctx.call_id,
        secret=keep.handle.secret,
        owner_sha256=owner_of(state.ctx),
        from_tokens=emitted,
        attachment=state.calls.reader,
    )
    call: Any = worker.decode.Attach(asked, timeout=state.ctx.deadline.remaining_seconds)
    is_attached = False
    try:
        attached = await first_of(call)
        check_attached(asked, attached, worker)
        if list(attached.token_ids[:emitted]) != list(state.completion.token_ids):
            raise InvalidReply("the worker's next process has other tokens of the answer than its client")
        is_attached = True
        return AdoptedDecode(worker, attached, call)
    finally:
        if not is_attached:
            await call.aclose()
