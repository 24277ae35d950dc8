"""Stops a request from outside: on every worker that has got it, and here."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from baton.calls import unary
from baton.engine.v1 import worker_pb2
from baton.errors import BatonError, Cancelled
from baton.inference.v1 import generate_pb2
from router.workers.handle import WorkerHandle
from rpc.channels import best_effort
from rpc.timeouts import ABORT_SECONDS
from runtime.aio import cancellations, uncancel
from runtime.entropy import token_hex


class SharedCall(Protocol):
    """A call to a worker that several requests may wait for."""

    async def stop(self, leaving: int) -> generate_pb2.CancelReceipt | None:
        """Stops it if it has no more than `leaving` waiters. Returns what its worker confirms."""


class Cancellation:
    """Knows the workers that have got a request, and stops it on all of them. They know it by `call_id`.

    Their channels stay open until `close`, even if they leave the cluster: to release and to abort.
    """

    def __init__(self, call_id: str) -> None:
        self.call_id = call_id
        self.reason = ""  # why it was cancelled; empty if it was not
        self._workers: list[WorkerHandle] = []
        self._task: asyncio.Task[Any] | None = None  # while it runs the request
        self._is_stopped = False  # whether we have cancelled that task
        self._has_expired = False  # whether it was because its time was over
        self._is_closed = False
        self._on_close: asyncio.Event | None = None  # for who waits
        self._waiting_for: dict[SharedCall, int] = {}
        self._parts: list[Cancellation] = []
        self._own_id = ""

    @property
    def own_id(self) -> str:
        """An id for calls that this router alone makes: `call_id` is also that of routers which resume the answer.

        A late abort of such a call, by a router that has lost the answer, stops nothing of the next one.
        """
        self._own_id = self._own_id or f"{self.call_id}/{token_hex(4)}"
        return self._own_id

    def part(self, call_id: str) -> "Cancellation":
        """The cancellation of a part of the request that workers know by an id of its own. Raises Cancelled."""
        if self.reason:
            raise Cancelled(self.reason)
        part = Cancellation(call_id)
        self._parts.append(part)
        return part

    async def run(self, work: Coroutine[Any, Any, None], seconds: float | None = None) -> None:
        """Runs the request, so that `cancel` can stop it. Raises Cancelled with the reason if it does, or has.

        After `seconds` it is stopped too, with TimeoutError.
        """
        if self.reason:
            work.close()
            raise Cancelled(self.reason)
        # In the caller's own task, which a task for each request would only wait for.
        self._task = asyncio.current_task()
        assert self._task is not None
        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._expire)
        try:
            await work
        except (asyncio.CancelledError, Cancelled) as error:
            # Not if the caller has cancelled the task, beside us.
            if self._has_expired and isinstance(error, asyncio.CancelledError) and cancellations(self._task) <= 1:
                raise TimeoutError from None
            if self.reason:
                raise Cancelled(self.reason) from None
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if self._is_stopped:
                uncancel(self._task)
            self._task = None

    def add_worker(self, worker: WorkerHandle) -> None:
        """Notes a worker before it gets the request. Raises Cancelled if the request was cancelled, or Unavailable."""
        if self.reason:
            raise Cancelled(self.reason)
        if worker not in self._workers:
            worker.add_user()
            self._workers.append(worker)

    @contextmanager
    def waiting_for(self, call: SharedCall) -> Iterator[None]:
        """Notes that the request waits for a shared call while the context is open."""
        self._waiting_for[call] = self._waiting_for.get(call, 0) + 1
        try:
            yield
        finally:
            self._waiting_for[call] -= 1
            if not self._waiting_for[call]:
                del self._waiting_for[call]

    def close(self) -> None:
        """Notes that nothing of the request runs here any more."""
        if self._is_closed:
            return
        for worker in self._workers:
            worker.remove_user()
        self._is_closed = True
        if self._on_close is not None:
            self._on_close.set()

    async def cancel(self, reason: str) -> Sequence[generate_pb2.CancelReceipt]:
        """Stops the request on its workers, then here. Returns what the workers confirmed.

        If this is cancelled, it stops the request here without waiting for the workers.
        """
        self.reason = reason
        with ExitStack() as channels:
            for worker in () if self._is_closed else self._workers:
                channels.enter_context(worker.keep_open())
            try:
                shared = await self._stop_shared_calls()
                # Together: the first part that ends would take the others with it, before their workers have confirmed.
                stopping = asyncio.ensure_future(self._abort_on(self._workers))
                parts = await asyncio.gather(*(part.cancel(reason) for part in self._parts))
                receipts = await stopping
            finally:
                self._stop_task()
            await self._wait_until_closed()
            # A call may have been on its way to a worker that had nothing to stop at the first abort.
            stopped = {receipt.worker_id for receipt in receipts}
            late = await self._abort_on([worker for worker in self._workers if worker.record.worker_id not in stopped])
        return [*shared, *(receipt for part in parts for receipt in part), *receipts, *late]

    async def _wait_until_closed(self) -> None:
        if not self._is_closed:
            self._on_close = self._on_close or asyncio.Event()
            await self._on_close.wait()

    def _stop_task(self) -> None:
        """Cancels the task, once: a second cancellation would interrupt what it does to end the request."""
        if self._task is not None and not self._is_stopped:
            self._is_stopped = True
            self._task.cancel()

    def _expire(self) -> None:
        self._has_expired = not self._is_stopped
        self._stop_task()

    async def _stop_shared_calls(self) -> Sequence[generate_pb2.CancelReceipt]:
        waiting = self._waiting_for.items()
        receipts = await asyncio.gather(*(call.stop(leaving) for call, leaving in waiting))
        return [receipt for receipt in receipts if receipt]

    async def _abort_on(self, workers: Sequence[WorkerHandle]) -> Sequence[generate_pb2.CancelReceipt]:
        """The receipts of the workers that had something to stop."""
        call_ids = [self.call_id, self._own_id] if self._own_id else [self.call_id]
        receipts = await asyncio.gather(*(abort(worker, call_id) for worker in workers for call_id in call_ids))
        return [receipt for receipt in receipts if receipt]


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
