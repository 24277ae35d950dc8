"""An Encode call under way, and those who wait for it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.inference.v1 import generate_pb2

from router.aborts import abort
from router.worker import Worker

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Flight(Generic[Result]):
    """Lands when its task has ended or nobody waits any more. `forget` lets nobody else begin to wait for it.

    `worker` and `request_id` say where the call is, from its beginning on.
    """

    forget: Callable[["Flight[Result]"], None]
    task: "asyncio.Task[Result] | None" = None
    waiters: int = 0
    worker: Worker | None = None
    request_id: str = ""

    def visit(self, worker: Worker, request_id: str) -> None:
        """Notes that a worker is about to get the call."""
        self.worker, self.request_id = worker, request_id

    async def stop(self, leaving: int) -> generate_pb2.CancelReceipt | None:
        """Stops the call on its worker if `leaving` waiters are all that it has; what the worker confirms."""
        if self.worker is None or self.waiters > leaving:
            return None
        self.forget(self)
        return await abort(self.worker, self.request_id)
