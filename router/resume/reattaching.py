"""A kept decode whose call was lost: it goes on in its worker's process, or the next one, which has its ids and KV."""

from contextlib import suppress
from typing import Any

from baton.engine.v1 import decode_pb2
from baton.errors import BatonError, InvalidReply, NoWorker, StaleEpoch, StreamLost
from discovery.record import TAKES_OVER
from router.decoding.state import ExecutionState
from router.resume.attaching import first_of
from router.resume.record import owner_of
from router.telemetry import metrics
from router.workers.decode_calls import AdoptedDecode
from router.workers.handle import WorkerHandle
from router.workers.replies import check_attached, is_lost_by
from runtime.aio import timeout
from runtime.clock import monotonic

# A worker that is heard of for so long after a loss runs in the same process: the next one would have registered.
_REGISTERED_SECONDS = 0.5


async def reattach(state: ExecutionState, lost: WorkerHandle, error: BatonError) -> AdoptedDecode | None:
    """The decode on the worker that was lost by `error`, once it is ready again; None if it does not go on there.

    The caller owns its call. What the lost call had told of it is all there, but perhaps more.
    """
    if not is_lost_by(error):
        return None
    emitted = len(state.completion.token_ids)
    if state.reattached_after == (lost.record.process, emitted):
        return None  # a process whose calls break again before a token is left
    state.reattached_after = lost.record.process, emitted
    takes_over = TAKES_OVER in lost.record.capabilities
    try:
        if takes_over:
            adopted = await _attach_to_kept(state, lost, emitted)
        else:
            adopted = await _attach(state, await _same_process(state, lost), emitted)
    except (TimeoutError, BatonError):
        if takes_over:
            metrics.REATTACHMENTS.labels("lost").inc()
        return None
    metrics.REATTACHMENTS.labels("attached").inc()
    return adopted


async def _attach_to_kept(state: ExecutionState, lost: WorkerHandle, emitted: int) -> AdoptedDecode:
    """Attaches in the process of `_next_process`.

    What seems to be the lost process may be the next one, not yet registered: its connection is closed once it is.
    """
    worker = await _next_process(state, lost)
    try:
        return await _attach(state, worker, emitted)
    except StreamLost as error:
        if not isinstance(error.__cause__, StaleEpoch):
            raise
        async with timeout(_patience_seconds(state, lost)):
            worker = await state.placer.await_next_process(lost.record)
        return await _attach(state, worker, emitted)


def _patience_seconds(state: ExecutionState, lost: WorkerHandle) -> float:
    seconds = state.retries.reattach_seconds
    if seconds and not _others_can(state, lost):
        seconds = max(seconds, state.retries.wait_seconds)
    return min(seconds, state.ctx.deadline.remaining_seconds)


async def _next_process(state: ExecutionState, lost: WorkerHandle) -> WorkerHandle:
    """The next process of a worker that keeps its KV, or the same one, if its connection alone was lost.

    Raises TimeoutError if neither is ready in time.
    """
    lost_at, is_heard = monotonic(), False
    try:
        async with timeout(_patience_seconds(state, lost)):
            while True:
                with suppress(TimeoutError):
                    async with timeout(_REGISTERED_SECONDS):
                        return await state.placer.await_next_process(lost.record)
                was_heard, is_heard = is_heard, lost.health.silent_seconds < monotonic() - lost_at
                if was_heard and is_heard and not lost.problem:
                    return lost
    except TimeoutError:
        if lost.problem:
            raise
        return lost


async def _same_process(state: ExecutionState, lost: WorkerHandle) -> WorkerHandle:
    """The worker, whose connection alone may be lost, if it is ready before another one can continue.

    Raises NoWorker, and TimeoutError.
    """
    async with timeout(min(state.retries.wait_seconds, state.ctx.deadline.remaining_seconds)):
        while not _others_can(state, lost):
            if not lost.problem:
                return lost
            await state.placer.change()
    raise NoWorker("another worker can continue")


def _others_can(state: ExecutionState, lost: WorkerHandle) -> bool:
    if state.is_disaggregated:
        return False  # another one would have to run the prompt
    tried = state.attempts.tried if state.attempts else frozenset[str]()
    return state.placer.can_decode(state.routing_request, state.context_tokens, tried | {lost.record.process})


async def _attach(state: ExecutionState, worker: WorkerHandle, emitted: int) -> AdoptedDecode:
    keep = state.ctx.keep
    assert keep is not None
    asked = decode_pb2.AttachRequest(
        request_id=state.ctx.call_id,
        secret=keep.handle.secret,
        owner_sha256=owner_of(state.ctx),
        from_tokens=emitted,
        attachment=state.calls.reader.attachment,
        execution=state.calls.reader.execution,
        epoch=worker.record.epoch,
    )
    with worker.keep_open():
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
