"""The steps of requests, told as they happen, so that faults and clients can be aimed at one of them.

| step | when | node |
|---|---|---|
| prefill, decode, encode, prefetch, warm | a worker admits such a call | the worker |
| ended | such a call ends, whatever its end | the worker |
| pull | a block was read | the reader |
| release | a lease is about to be released | its owner |
| token | a client got tokens | the worker that decodes |
| stall | a client has got nothing of a kept answer for a while | (of clients alone) |
| start | a process of a worker with a keeper begins | the worker |
| takeover | it has the memory that another one has left, and has computed nothing yet | the worker |
"""

import asyncio
from collections.abc import Callable
from typing import Any

from router.context import RequestContext, RequestTable
from services.handoff.leases import LeaseTable, Released
from services.requests.calls import Calls, RunningCall
from simulation import transport
from simulation.loop import NODE

# Of the step, its node, and the request; empty where it is not known.
Listener = Callable[[str, str, str], None]


class Steps:
    """Watches the product's own functions. `tell` has the steps that clients see."""

    def __init__(self, listeners: list[Listener]) -> None:
        self._listeners = listeners
        self._requests: dict[str, str] = {}  # the client's id of each call at workers
        self.ids: dict[str, set[str]] = {}  # of the calls at workers, by the client's id
        self.routers: dict[str, Any] = {}  # the node whose request a call is, by the call's id
        self._admitted: dict[Any, str] = {}  # the call that each task of a worker runs
        self.kept: set[str] = set()  # calls that go on without their router
        self.first: dict[str, str] = {}  # of several answers to a request: the call of the first one, by the others'

    def tell(self, step: str, node: str, request_id: str) -> None:
        """Tells all listeners."""
        for listener in self._listeners:
            listener(step, node, request_id)

    def install(self) -> None:
        """Begins to watch, for ever."""
        add, admit, end, release = RequestTable.add, Calls._admit, RunningCall.end, LeaseTable.release
        part = RequestContext.part

        def adding(table: RequestTable, ctx: Any) -> None:
            self._note(ctx)
            add(table, ctx)

        def parting(ctx: RequestContext, answer: int) -> RequestContext:
            other = part(ctx, answer)
            self._note(other)
            self.first[other.call_id] = ctx.call_id
            return other

        def admitting(calls: Calls, kind: str, request_id: str, *arguments: Any) -> None:
            admit(calls, kind, request_id, *arguments)
            self._admitted[asyncio.current_task()] = request_id
            self._at_node(kind, request_id)

        def ending(call: RunningCall) -> None:
            end(call)
            self._at_node("ended", self._admitted.pop(asyncio.current_task(), ""))

        async def releasing(table: LeaseTable, handoff_id: str, reader: str = "") -> Released:
            lease = table.find(handoff_id)
            self._at_node("release", lease.request_id if lease else "")
            return await release(table, handoff_id, reader)

        RequestTable.add, RequestContext.part = adding, parting  # type: ignore[method-assign]
        Calls._admit = admitting  # type: ignore[method-assign]
        RunningCall.end = ending  # type: ignore[method-assign]
        LeaseTable.release = releasing  # type: ignore[method-assign]
        transport.record_blocks(lambda reader: self.tell("pull", reader.name, ""))

    def request_of(self, call_id: str) -> str:
        """The client's id of a request's call; empty if it is not known."""
        return self._requests.get(router_call(call_id), "")

    def _note(self, ctx: RequestContext) -> None:
        self._requests[ctx.call_id] = ctx.request_id
        self.ids.setdefault(ctx.request_id, set()).add(ctx.call_id)
        self.routers[ctx.call_id] = NODE.get()
        if ctx.keep is not None:
            self.kept.add(ctx.call_id)

    def _at_node(self, step: str, call_id: str) -> None:
        node = NODE.get()
        if node is not None:
            self.tell(step, node.name, self.request_of(call_id))


def router_call(call_id: str) -> str:
    """The id of a router's call, of which a call at a worker may have an id of this execution alone."""
    return call_id.partition("/")[0]
