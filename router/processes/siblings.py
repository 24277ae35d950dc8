"""Requests that may run in another process of this router: a client's cancel reaches any of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.errors import RequestNotFound, Unavailable
from baton.inference.v1 import generate_pb2
from router.context import RequestTable
from router.processes.messages import ProcessLink, RequestsStopped, StopRequests
from rpc.auth.caller import Caller

# More than workers have to confirm.
STOP_SECONDS = 10.0
# More than the supervisor waits for the other processes.
_PATIENCE_SECONDS = STOP_SECONDS + 2.0
_REASON = "cancelled by CancelGeneration"


@dataclass(frozen=True, slots=True)
class StoppedRequests:
    """The number of stopped requests, and their workers' confirmations."""

    count: int = 0
    receipts: Sequence[generate_pb2.CancelReceipt] = ()


class Siblings(Protocol):
    """The other processes of this router."""

    async def stop(self, request_id: str, caller: Caller | None) -> StoppedRequests:
        """Stops what a caller runs there under this id. Raises Unavailable if they cannot be asked."""


class NoSiblings:
    """Of a router that is one process."""

    async def stop(self, request_id: str, caller: Caller | None) -> StoppedRequests:
        """Stops nothing."""
        del request_id, caller
        return StoppedRequests()


class LinkedSiblings:
    """Those that the supervisor knows."""

    def __init__(self, link: ProcessLink) -> None:
        self._link = link

    async def stop(self, request_id: str, caller: Caller | None) -> StoppedRequests:
        """Asks the supervisor, which asks them all."""
        question = StopRequests.of(request_id, caller)
        try:
            answer = await self._link.call(question, RequestsStopped, _PATIENCE_SECONDS)
        except TimeoutError:
            raise Unavailable("the other processes of this router do not answer") from None
        return StoppedRequests(answer.count, answer.messages())


async def stop_here(requests: RequestTable, request_id: str, caller: Caller | None) -> StoppedRequests:
    """Stops what a caller runs in this process under this id."""
    try:
        found = requests.find(request_id, caller)
    except RequestNotFound:
        return StoppedRequests()
    stopped = await asyncio.gather(*(ctx.cancellation.cancel(_REASON) for ctx in found))
    return StoppedRequests(len(found), [receipt for receipts in stopped for receipt in receipts])


async def stop_everywhere(
    requests: RequestTable, siblings: Siblings, request_id: str, caller: Caller | None
) -> Sequence[generate_pb2.CancelReceipt]:
    """Stops what a caller runs under this id, in any process. Raises RequestNotFound, and Unavailable.

    Each process sees to it that a caller's ids are unique; the same id may run in two.
    """
    here, elsewhere = await asyncio.gather(
        stop_here(requests, request_id, caller), siblings.stop(request_id, caller), return_exceptions=True
    )
    if isinstance(here, BaseException):
        raise here
    if isinstance(elsewhere, BaseException):
        if not here.count:
            raise elsewhere
        elsewhere = StoppedRequests()
    if not here.count + elsewhere.count:
        raise RequestNotFound(f"no request {request_id!r} runs here")
    return [*here.receipts, *elsewhere.receipts]
