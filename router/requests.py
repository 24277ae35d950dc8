"""The requests that run on this router, by their ids, and how one is cancelled from outside."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from baton.inference.v1 import generate_pb2

from router.aborts import abort
from router.worker import Worker
from rpc.caller import Caller, current_caller
from rpc.errors import Cancelled, RequestExists, RequestNotFound


class Shared(Protocol):
    """Work that several requests may wait for."""

    async def stop(self, leaving: int) -> generate_pb2.CancelReceipt | None:
        """Stops it if nobody waits for it but `leaving` waiters, and returns what its worker confirms."""


class RunningRequest:
    """A request from its arrival to its end. `workers` are those it was ever sent to; `task` does its work.

    Its workers can be called until its end, also after they have left: to release, and to abort.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.workers: list[Worker] = []
        self.task: asyncio.Task[None] | None = None
        self.cancelled_because = ""
        self._owner = current_caller()
        self._ended = asyncio.Event()
        self._uses = ExitStack()
        self._waiting_for: Counter[Shared] = Counter()

    def is_visible_to(self, caller: Caller | None) -> bool:
        """Whether it is this caller's own; an operator, and whoever need not say who he is, sees all."""
        return caller is None or caller.role == "operator" or caller == self._owner

    def visit(self, worker: Worker) -> None:
        """Notes a worker that is about to get the request. Raises Cancelled if nobody is to get it any more."""
        if self.cancelled_because:
            raise Cancelled(self.cancelled_because)
        if worker not in self.workers:
            self.workers.append(worker)
            self._uses.enter_context(worker.in_use())

    @contextmanager
    def waiting_for(self, shared: Shared) -> Iterator[None]:
        """Notes, for as long as the context is open, that it waits for something that others may wait for too."""
        self._waiting_for[shared] += 1
        try:
            yield
        finally:
            self._waiting_for -= Counter({shared: 1})

    def end(self) -> None:
        """Notes that nothing of it runs here any more."""
        self._uses.close()
        self._ended.set()

    async def cancel(self, reason: str) -> Sequence[generate_pb2.CancelReceipt]:
        """Stops it on all its workers, then here, and returns what the workers confirmed."""
        self.cancelled_because = reason
        with ExitStack() as uses:
            for worker in self.workers:
                uses.enter_context(worker.in_use())
            shared = await self._stop_shared()
            stopped = await self._abort_on(self.workers)
            if self.task is not None:
                self.task.cancel()
            await self._ended.wait()
            # A call may have been on its way to a worker that had nothing to stop when it was asked.
            late = await self._abort_on([worker for worker in self.workers if worker.record.worker_id not in stopped])
        return [*shared, *stopped.values(), *late.values()]

    async def _stop_shared(self) -> Sequence[generate_pb2.CancelReceipt]:
        waiting = self._waiting_for.items()
        receipts = await asyncio.gather(*(shared.stop(leaving) for shared, leaving in waiting))
        return [receipt for receipt in receipts if receipt]

    async def _abort_on(self, workers: Sequence[Worker]) -> dict[str, generate_pb2.CancelReceipt]:
        """What workers confirm to have stopped, by their ids."""
        receipts = await asyncio.gather(*(abort(worker, self.request_id) for worker in workers))
        return {receipt.worker_id: receipt for receipt in receipts if receipt}


class RequestTable:
    """All running requests. No two have the same id."""

    def __init__(self) -> None:
        self._running: dict[str, RunningRequest] = {}

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def enter(self, request_id: str) -> Iterator[RunningRequest]:
        """A request for the time of the context; an empty id is filled. Raises RequestExists."""
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._running:
            raise RequestExists(f"a request {request_id!r} is running")
        running = self._running[request_id] = RunningRequest(request_id)
        try:
            yield running
        finally:
            del self._running[request_id]
            running.end()

    def find(self, request_id: str) -> RunningRequest:
        """The running request of that id. Raises RequestNotFound, also for another caller's."""
        running = self._running.get(request_id)
        if running is None or not running.is_visible_to(current_caller()):
            raise RequestNotFound(f"no request {request_id!r} runs here")
        return running
