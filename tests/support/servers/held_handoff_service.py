"""An owner's HandoffService that delays one method: a barrier between a reader and its next step."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.clients.worker_calls import WorkerCalls
from support.eventually import PATIENCE_SECONDS

from baton.calls import unary
from baton.engine.v1 import handoff_pb2_grpc
from rpc.health import Health
from rpc.server import Service, serve


class HeldBack(handoff_pb2_grpc.HandoffServiceServicer):
    """Passes calls on to an owner. `asked` is set when the method is called; it is answered after `let_go`.

    `given_up` is set when a caller no longer waits for the answer.
    """

    def __init__(self, owner: WorkerCalls, method: str) -> None:
        self.address = ""
        self.asked = asyncio.Event()
        self.let_go = asyncio.Event()
        self.given_up = asyncio.Event()
        self._owner = owner
        self._method = method

    async def GetPool(self, request: Any, context: Any) -> Any:
        return await self._pass_on("GetPool", request)

    async def Renew(self, request: Any, context: Any) -> Any:
        return await self._pass_on("Renew", request)

    async def Release(self, request: Any, context: Any) -> Any:
        return await self._pass_on("Release", request)

    async def _pass_on(self, method: str, request: Any) -> Any:
        if method == self._method:
            self.asked.set()
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.given_up.set()
                raise
        return await unary(getattr(self._owner.handoffs, method)(request, timeout=PATIENCE_SECONDS))


@asynccontextmanager
async def held_back(owner: WorkerCalls, method: str) -> AsyncIterator[HeldBack]:
    """Yields the owner, reachable at `address`."""
    servicer = HeldBack(owner, method)
    add = handoff_pb2_grpc.add_HandoffServiceServicer_to_server
    service = Service("baton.engine.v1.HandoffService", add, servicer)
    async with serve("127.0.0.1:0", [service], health=Health(), drain_seconds=0) as server:
        servicer.address = server.address
        yield servicer
        servicer.let_go.set()
