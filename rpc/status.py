"""Errors as gRPC statuses: one table from error class to code, `google.rpc` details for everything else.

baton/error_details.py turns a status back into its error.
"""

from collections.abc import Iterator
from functools import cache
from urllib.parse import quote

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from grpc_status import rpc_status

from baton.error_details import DOMAIN, kind_of
from baton.errors import (
    BatonError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    HandoffLost,
    InvalidRequest,
    LayoutMismatch,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    QuotaUnavailable,
    RequestExists,
    RequestNotFound,
    RoleMismatch,
    RouterStarting,
    SlowReader,
    StaleAttempt,
    StaleEpoch,
    StreamAdopted,
    StreamDiverged,
    StreamLost,
    TokensLost,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from runtime.telemetry.logs import log_fields

# Subclasses that are not listed have their parent's code.
CODES: dict[type[BatonError], StatusCode] = {
    BatonError: StatusCode.INTERNAL,
    Cancelled: StatusCode.CANCELLED,
    ConfigError: StatusCode.FAILED_PRECONDITION,
    DeadlineExceeded: StatusCode.DEADLINE_EXCEEDED,
    EngineFailed: StatusCode.INTERNAL,
    HandoffLost: StatusCode.ABORTED,
    InvalidRequest: StatusCode.INVALID_ARGUMENT,
    LayoutMismatch: StatusCode.FAILED_PRECONDITION,
    ModelNotFound: StatusCode.NOT_FOUND,
    Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    PermissionDenied: StatusCode.PERMISSION_DENIED,
    QuotaExceeded: StatusCode.RESOURCE_EXHAUSTED,
    RequestExists: StatusCode.ALREADY_EXISTS,
    RequestNotFound: StatusCode.NOT_FOUND,
    RoleMismatch: StatusCode.FAILED_PRECONDITION,
    SlowReader: StatusCode.RESOURCE_EXHAUSTED,
    StaleAttempt: StatusCode.ABORTED,
    StaleEpoch: StatusCode.ABORTED,
    StreamAdopted: StatusCode.ABORTED,
    StreamDiverged: StatusCode.ABORTED,
    StreamLost: StatusCode.NOT_FOUND,
    TokensLost: StatusCode.DATA_LOSS,
    Unauthenticated: StatusCode.UNAUTHENTICATED,
    Unavailable: StatusCode.UNAVAILABLE,
    Unsupported: StatusCode.UNIMPLEMENTED,
}

OK = "OK"

# The caller has to change the request, or to try again later; every other error is the cluster's.
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

# HTTP/2 peers drop trailers over 8 KiB, and the status with them. The message travels twice: percent-encoded as
# grpc-message, and in grpc-status-details-bin, which is base64. These bounds keep the sum below 7 KiB.
_MESSAGE_BYTES = 1536
_VIOLATIONS_BYTES = 1536
_NAME_BYTES = 256

# What gRPC does not percent-encode, besides letters, digits and -._~
_PLAIN = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"


def to_status(error: BaseException) -> grpc.Status:
    """The gRPC status of `error`, with `grpc-status-details-bin` in its trailing metadata.

    Anything that is not a BatonError is INTERNAL without its text, which may hold what callers must not see. The
    request id is taken from the fields of log lines. Long texts are cut, so that the status always arrives.
    """
    if not isinstance(error, BatonError):
        error = BatonError("internal error")
    status = status_pb2.Status(code=code_of(type(error)).value[0], message=_cut(error.message, _MESSAGE_BYTES))
    for detail in _details(error):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return rpc_status.to_status(status)


def code_of(kind: type[BatonError]) -> StatusCode:
    """The status code of an error class: its own in the table, or its nearest parent's."""
    return next(CODES[parent] for parent in kind.__mro__ if parent in CODES)


@cache  # as many as there are reasons
def outcome_of(reason: str) -> str:
    """`ok`, `cancelled`, `refused` or `failed`: a metric's label for OK, or for the reason of an error."""
    if reason == OK:
        return "ok"
    code = code_of(kind_of(reason) or BatonError)
    if code == StatusCode.CANCELLED:
        return "cancelled"
    return "refused" if code in _REFUSALS else "failed"


def _details(error: BatonError) -> Iterator[Message]:
    yield error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_origin(error))
    match error:
        case InvalidRequest():
            yield _bad_request(error)
        case Overloaded() | QuotaExceeded():
            if error.subject or isinstance(error, QuotaExceeded):
                yield _quota_failure(error.subject, error.message)
            yield _retry_info(error.retry_after_seconds)
        case RouterStarting() | QuotaUnavailable():
            yield _retry_info(error.retry_after_seconds)


def _origin(error: BatonError) -> dict[str, str]:
    request_id = str(log_fields().get("request_id", ""))
    origin = {"stage": error.stage, "worker_id": error.worker_id, "request_id": request_id}
    return {key: _cut(value, _NAME_BYTES) for key, value in origin.items() if value}


def _bad_request(error: InvalidRequest) -> error_details_pb2.BadRequest:
    bad = error_details_pb2.BadRequest()
    for violation in error.violations:
        bad.field_violations.add(
            field=_cut(violation.field, _NAME_BYTES), description=_cut(violation.description, 2 * _NAME_BYTES)
        )
        if bad.ByteSize() > _VIOLATIONS_BYTES:
            del bad.field_violations[-1]
            break
    return bad


def _quota_failure(subject: str, message: str) -> error_details_pb2.QuotaFailure:
    violation = error_details_pb2.QuotaFailure.Violation(
        subject=_cut(subject, _NAME_BYTES), description=_cut(message, _NAME_BYTES)
    )
    return error_details_pb2.QuotaFailure(violations=[violation])


def _retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromNanoseconds(int(seconds * 1e9))
    return retry


def _cut(text: str, limit: int) -> str:
    """`text` in at most `limit` bytes of percent-encoding, which is never shorter than its UTF-8."""
    text = text[: limit + 1].encode("utf-8", "replace").decode()
    if len(quote(text, safe=_PLAIN)) <= limit:
        return text
    while len(quote(text, safe=_PLAIN)) > limit - len("..."):
        text = text[: len(text) * 9 // 10]
    return text + "..."
