"""How a request or a call ended, in one word: few enough of them to be a metric's label."""

from functools import cache

from grpc import StatusCode

from rpc.errors import BatonError
from rpc.status import code_of, kind_of

OK = "OK"

# The caller's to mend, or to try again later; everything else that is no success is the cluster's fault.
_REFUSALS = frozenset(
    {
        StatusCode.ALREADY_EXISTS,
        StatusCode.INVALID_ARGUMENT,
        StatusCode.NOT_FOUND,
        StatusCode.PERMISSION_DENIED,
        StatusCode.RESOURCE_EXHAUSTED,
        StatusCode.UNAUTHENTICATED,
        StatusCode.UNIMPLEMENTED,
    }
)


@cache  # as many as there are reasons
def outcome_of(reason: str) -> str:
    """`ok`, `cancelled`, `refused` or `failed`, by the reason of the error that was the end, or OK."""
    if reason == OK:
        return "ok"
    code = code_of(kind_of(reason) or BatonError)
    if code == StatusCode.CANCELLED:
        return "cancelled"
    return "refused" if code in _REFUSALS else "failed"
