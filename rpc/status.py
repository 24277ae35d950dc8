"""Errors as gRPC statuses and back: one table from class to code, `google.rpc` details for everything else."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast
from urllib.parse import quote

import grpc
import structlog
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode, aio
from grpc_status import rpc_status

from rpc.errors import (
    BatonError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    FieldViolation,
    HandoffLost,
    InvalidRequest,
    LayoutMismatch,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    RequestExists,
    RequestNotFound,
    RoleMismatch,
    SlowReader,
    StaleEpoch,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

DOMAIN = "baton"

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
    StaleEpoch: StatusCode.ABORTED,
    Unauthenticated: StatusCode.UNAUTHENTICATED,
    Unavailable: StatusCode.UNAVAILABLE,
    Unsupported: StatusCode.UNIMPLEMENTED,
}

# What a status without our ErrorInfo means: it comes from gRPC itself, from a proxy, or from a foreign server.
FOREIGN: dict[StatusCode, type[BatonError]] = {
    # gRPC's answer to calls that reach a server as it stops. What was cancelled on this side is a CancelledError.
    StatusCode.CANCELLED: Unavailable,
    StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    StatusCode.INVALID_ARGUMENT: InvalidRequest,
    StatusCode.OUT_OF_RANGE: InvalidRequest,
    StatusCode.PERMISSION_DENIED: PermissionDenied,
    StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    StatusCode.UNAUTHENTICATED: Unauthenticated,
    StatusCode.UNAVAILABLE: Unavailable,
    StatusCode.UNIMPLEMENTED: Unsupported,
}

# HTTP/2 peers drop trailers over 8 KiB, and the status with them. The message travels twice: percent-encoded as
# grpc-message, and in grpc-status-details-bin, which is base64. These bounds keep the sum below 7 KiB.
_MESSAGE_BYTES = 1536
_VIOLATIONS_BYTES = 1536
_NAME_BYTES = 256

# What gRPC does not percent-encode, besides letters, digits and -._~
_PLAIN = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"

_DEFAULT_RETRY_SECONDS = 1.0


class _Details(NamedTuple):
    """What a status says besides code and message."""

    info: error_details_pb2.ErrorInfo
    bad_request: error_details_pb2.BadRequest
    retry: error_details_pb2.RetryInfo
    quota: error_details_pb2.QuotaFailure


def to_status(error: BaseException) -> grpc.Status:
    """The status that says `error` on the wire, with `grpc-status-details-bin` in its trailing metadata.

    Anything that is not a BatonError is INTERNAL and says nothing of itself: its text may hold what callers must not
    see. The request id is taken from structlog's context. Long texts are cut, so that the status always arrives.
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


def kind_of(reason: str) -> type[BatonError] | None:
    """The error class with this reason, if there is one."""
    return {kind.reason: kind for kind in _kinds(BatonError)}.get(reason)


def from_rpc_error(error: aio.AioRpcError) -> BatonError:
    """The error that a failed call stands for.

    A status of ours gives back the class it was made from, with everything it carried. Any other is judged by its
    code, and where the code does not say what to do it is a plain BatonError.
    """
    details = _read_details(error)
    message = error.details() or ""
    kind = _class_of(details.info) or _foreign_class(error.code(), message)
    restored = _restore(kind, message or error.code().name, details)
    restored.stage = details.info.metadata.get("stage", "")
    restored.worker_id = details.info.metadata.get("worker_id", "")
    return restored


def _details(error: BatonError) -> Iterator[Message]:
    yield error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_origin(error))
    match error:
        case InvalidRequest():
            yield _bad_request(error)
        case Overloaded():
            yield _retry_info(error.retry_after_seconds)
        case QuotaExceeded():
            violation = error_details_pb2.QuotaFailure.Violation(
                subject=_cut(error.subject, _NAME_BYTES), description=_cut(error.message, _NAME_BYTES)
            )
            yield error_details_pb2.QuotaFailure(violations=[violation])
            yield _retry_info(error.retry_after_seconds)


def _origin(error: BatonError) -> dict[str, str]:
    request_id = str(structlog.contextvars.get_contextvars().get("request_id", ""))
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


def _read_details(error: aio.AioRpcError) -> _Details:
    details = _Details(
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
        error_details_pb2.QuotaFailure(),
    )
    for packed in _status_of(error).details:
        for detail in details:
            if packed.Is(detail.DESCRIPTOR):
                packed.Unpack(detail)
    return details


def _status_of(error: aio.AioRpcError) -> status_pb2.Status:
    """The rich status in the trailers; an empty one if there is none, or if a foreign server's is not readable."""
    trailers = cast("Iterable[tuple[str, bytes]]", error.trailing_metadata() or ())
    wire = next((value for key, value in trailers if key == "grpc-status-details-bin"), b"")
    try:
        return status_pb2.Status.FromString(wire)
    except DecodeError:
        return status_pb2.Status()


def _class_of(info: error_details_pb2.ErrorInfo) -> type[BatonError] | None:
    return kind_of(info.reason) if info.domain == DOMAIN else None


def _kinds(kind: type[BatonError]) -> Iterator[type[BatonError]]:
    # Parents last: of two classes with one reason, the parent is the one that can be built from what travelled.
    for child in kind.__subclasses__():
        yield from _kinds(child)
    yield kind


def _foreign_class(code: StatusCode, message: str) -> type[BatonError]:
    # gRPC's own answer to a message over the size limit; sending it again would not help.
    if code is StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        return InvalidRequest
    return FOREIGN.get(code, BatonError)


def _restore(kind: type[BatonError], message: str, details: _Details) -> BatonError:
    if issubclass(kind, InvalidRequest):
        violations = [FieldViolation(v.field, v.description) for v in details.bad_request.field_violations]
        return kind(violations or [FieldViolation("request", message)])
    if issubclass(kind, Overloaded):
        return kind(message, retry_after_seconds=_retry_seconds(details.retry))
    if issubclass(kind, QuotaExceeded):
        subject = next((v.subject for v in details.quota.violations), "")
        return kind(message, subject=subject, retry_after_seconds=_retry_seconds(details.retry))
    return kind(message)


def _retry_seconds(retry: error_details_pb2.RetryInfo) -> float:
    if not retry.HasField("retry_delay"):
        return _DEFAULT_RETRY_SECONDS
    return float(retry.retry_delay.ToNanoseconds() / 1e9)
