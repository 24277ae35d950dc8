"""Metadata and statuses of calls as messages, and back."""

from collections.abc import Iterable
from dataclasses import dataclass

from grpc import StatusCode

from baton.engine.v1 import multiplex_pb2 as pb
from baton_http2.wire.metadata import STATUS_CODES

Metadata = tuple[tuple[str, "str | bytes"], ...]


def to_messages(metadata: Iterable[tuple[str, str | bytes]]) -> list[pb.CallMetadata]:
    """Metadata as messages."""
    return [
        pb.CallMetadata(key=key, value=value.encode() if isinstance(value, str) else value) for key, value in metadata
    ]


def from_messages(messages: Iterable[pb.CallMetadata]) -> Metadata:
    """Messages as metadata: bytes for keys that end in -bin, texts for all others."""
    return tuple(
        (one.key, one.value if one.key.endswith("-bin") else one.value.decode("utf-8", "replace")) for one in messages
    )


@dataclass(frozen=True, slots=True)
class FailedStatus:
    """The status of a call that failed, in the form that `from_rpc_error` reads."""

    status: pb.CallStatus

    def code(self) -> StatusCode:
        """The status code."""
        return STATUS_CODES.get(self.status.code, StatusCode.UNKNOWN)

    def details(self) -> str:
        """The message."""
        return self.status.message

    def trailing_metadata(self) -> Metadata:
        """The trailers."""
        return from_messages(self.status.trailers)
