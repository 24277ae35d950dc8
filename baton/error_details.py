"""From the status of a failed call to the error that it stands for, by its `google.rpc` details."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    FieldViolation,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    QuotaUnavailable,
    RouterStarting,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

DOMAIN = "baton"

# The meaning of a status without our ErrorInfo: from gRPC itself, a proxy, or another kind of server.
_FOREIGN: dict[StatusCode, type[BatonError]] = {
    # gRPC's answer to calls that reach a server as it stops. A call that this side cancelled is handled by its caller.
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

_DEFAULT_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 3600.0  # whatever a peer says


class FailedCall(Protocol):
    """The part of grpc.RpcError and grpc.aio.AioRpcError that both have."""

    def code(self) -> Any:
        """The grpc.StatusCode."""

    def details(self) -> str | None:
        """The message."""

    def trailing_metadata(self) -> Any:
        """Pairs of key and value, or None."""


class _Details(NamedTuple):
    """A status' details, besides its code and message."""

    info: error_details_pb2.ErrorInfo
    bad_request: error_details_pb2.BadRequest
    retry: error_details_pb2.RetryInfo
    quota: error_details_pb2.QuotaFailure


def from_rpc_error(error: FailedCall) -> BatonError:
    """The error that a failed call stands for.

    A status that a Baton process sent becomes the class that it was made from, with all of its attributes. Any other
    status is judged by its code, and is a plain BatonError where the code does not say what to do.
    """
    details = _read_details(error)
    message = error.details() or ""
    known = _class_of(details.info)
    restored = _restore(known or _foreign_class(error.code(), message), message or error.code().name, details)
    if known is None:
        restored.is_bare = True
    restored.stage = details.info.metadata.get("stage", "")
    restored.worker_id = details.info.metadata.get("worker_id", "")
    return restored


def kind_of(reason: str) -> type[BatonError] | None:
    """The error class with this reason, if there is one."""
    return {kind.reason: kind for kind in _kinds(BatonError)}.get(reason)


def trailer(error: FailedCall, key: str) -> bytes:
    """The value of one key of the trailing metadata; empty if it is missing."""
    trailers: Sequence[tuple[str, bytes]] = error.trailing_metadata() or ()
    return next((value for name, value in trailers if name == key), b"")


def _read_details(error: FailedCall) -> _Details:
    details = _Details(
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
        error_details_pb2.QuotaFailure(),
    )
    for packed in _status_of(error).details:
        for detail in details:
            if packed.Is(detail.DESCRIPTOR):
                _unpack(packed, detail)
    return details


def _unpack(packed: any_pb2.Any, detail: Message) -> None:
    """Fills `detail`; leaves it empty where the peer's bytes are not such a message."""
    try:
        packed.Unpack(detail)
    except DecodeError:
        detail.Clear()


def _status_of(error: FailedCall) -> status_pb2.Status:
    """The rich status in the trailers; an empty one if there is none, or if it cannot be parsed."""
    try:
        return status_pb2.Status.FromString(trailer(error, "grpc-status-details-bin"))
    except DecodeError:
        return status_pb2.Status()


def _class_of(info: error_details_pb2.ErrorInfo) -> type[BatonError] | None:
    kind = kind_of(info.reason) if info.domain == DOMAIN else None
    # Others are of one process, and are not made of a message alone.
    return kind if kind is not None and kind.__module__ == BatonError.__module__ else None


def _kinds(kind: type[BatonError]) -> Iterator[type[BatonError]]:
    # Parents last: of two classes with one reason, the parent is the one that can be built from the details. Of several
    # parents the first is the one whose reason a class has.
    for child in kind.__subclasses__():
        if child.__bases__[0] is kind:
            yield from _kinds(child)
    yield kind


def _foreign_class(code: StatusCode, message: str) -> type[BatonError]:
    # gRPC's own answer to a message over the size limit; sending it again would not help.
    if code is StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        return InvalidRequest
    return _FOREIGN.get(code, BatonError)


def _restore(kind: type[BatonError], message: str, details: _Details) -> BatonError:
    if issubclass(kind, InvalidRequest):
        violations = [FieldViolation(v.field, v.description) for v in details.bad_request.field_violations]
        return kind(violations or [FieldViolation("request", message)])
    subject = next((v.subject for v in details.quota.violations), "")
    if issubclass(kind, Overloaded):
        return kind(message, retry_after_seconds=_retry_seconds(details.retry), subject=subject)
    if issubclass(kind, QuotaExceeded):
        return kind(message, subject=subject, retry_after_seconds=_retry_seconds(details.retry))
    if issubclass(kind, (RouterStarting, QuotaUnavailable)):
        return kind(message, retry_after_seconds=_retry_seconds(details.retry))
    return kind(message)


def _retry_seconds(retry: error_details_pb2.RetryInfo) -> float:
    if not retry.HasField("retry_delay"):
        return _DEFAULT_RETRY_SECONDS
    seconds = float(retry.retry_delay.ToNanoseconds() / 1e9)
    return min(max(seconds, 0.0), _LONGEST_RETRY_SECONDS)
