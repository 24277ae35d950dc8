"""Request contexts, for tests of parts of the router without a call."""

from baton.inference.v1 import generate_pb2
from router.context import Deadline, FaultPlan, RequestContext
from router.qos import RequestQos
from router.telemetry.stats import RequestStats
from router.workers.cancellation import Cancellation
from rpc.auth.caller import Caller


def request_context(request_id: str = "r", seconds: float = 3600.0, caller: Caller | None = None) -> RequestContext:
    """The context of an empty request."""
    return RequestContext(
        request=generate_pb2.GenerateRequest(request_id=request_id),
        request_id=request_id,
        caller=caller,
        message_bytes=0,
        qos=RequestQos(caller.name if caller else ""),
        deadline=Deadline(seconds),
        stats=RequestStats(request_id),
        faults=FaultPlan(),
        cancellation=Cancellation(f"{request_id} of {caller.name if caller else 'anyone'}"),
    )
