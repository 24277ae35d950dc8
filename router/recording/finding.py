"""Finds the records of a request at all routers of the fleet."""

import asyncio
from collections.abc import Iterable

from baton.engine.v1 import peer_pb2
from baton.errors import BatonError, InvalidRequest, RequestNotFound, Unavailable, Unsupported
from baton.inference.v1 import record_pb2
from router.peers.link import PeerLink
from router.recording.recorder import Recorder
from router.recording.table import latest
from rpc.auth.caller import current_caller

_LONGEST_ID = 256


async def find_here(request: peer_pb2.FindRecordsRequest, recorder: Recorder | None) -> peer_pb2.FindRecordsResponse:
    """The records that this router has. Raises InvalidRequest."""
    _check(request.request_id)
    tenant = request.tenant if request.HasField("tenant") else None
    found = await recorder.find(request.request_id, tenant) if recorder else []
    return peer_pb2.FindRecordsResponse(records=found)


async def find_everywhere(
    request_id: str, tenant: str, recorder: Recorder | None, links: Iterable[PeerLink]
) -> record_pb2.GetRecordsResponse:
    """The records of a request of the caller's tenant, or, for operators, of any.

    Raises RequestNotFound, and Unavailable if a router that may have one did not answer.
    """
    _check(request_id)
    if recorder is None:
        raise RequestNotFound("this router keeps no records: `records` of its configuration is off")
    caller = current_caller()
    is_operator = caller is not None and caller.role == "operator"
    asked = peer_pb2.FindRecordsRequest(request_id=request_id, tenant=None if is_operator else tenant)
    here, *others = await asyncio.gather(find_here(asked, recorder), *(_ask(link, asked) for link in links))
    found = [record for answer in (here, *others) if answer is not None for record in answer.records]
    if not found and None in others:
        raise Unavailable(f"no record of {request_id!r} was found, and {others.count(None)} routers did not answer")
    if not found:
        raise RequestNotFound(f"no record of {request_id!r} is kept for this tenant")
    return record_pb2.GetRecordsResponse(records=latest(found))


async def _ask(link: PeerLink, request: peer_pb2.FindRecordsRequest) -> peer_pb2.FindRecordsResponse | None:
    """The records of another router; None if it does not answer."""
    try:
        return await link.find_records(request)
    except Unsupported:
        return peer_pb2.FindRecordsResponse()  # it is of a version without records
    except BatonError:
        return None


def _check(request_id: str) -> None:
    if not request_id or len(request_id) > _LONGEST_ID or not request_id.isprintable():
        raise InvalidRequest.of("request_id", f"must be 1 to {_LONGEST_ID} printable characters")
