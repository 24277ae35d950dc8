"""One call, as its caller has it: messages in both directions, and the status at its end."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from grpc import StatusCode

from baton_http2.stream import Stream
from baton_http2.turns import wait_until_writable
from baton_http2.wire.frames import CANCEL, ENHANCE_YOUR_CALM, PROTOCOL_ERROR, StreamFailure
from baton_http2.wire.hpack import Field
from baton_http2.wire.messages import MessageFailure
from baton_http2.wire.metadata import STATUS_CODES, MalformedMetadata, Metadata, decode, percent_decoded
from baton_http2.wire.request import content_length

# Takes a message of the peer at once.
PushMessage = Callable[[bytes], None]

# Blocks that announce an answer (1xx); gRPC's servers send none, a proxy before them may.
_MAX_ANNOUNCEMENTS: Final = 16
# What an HTTP answer that is not gRPC's stands for (gRPC, http-grpc-status-mapping.md).
_OF_HTTP: Final = {
    b"400": StatusCode.INTERNAL,
    b"401": StatusCode.UNAUTHENTICATED,
    b"403": StatusCode.PERMISSION_DENIED,
    b"404": StatusCode.UNIMPLEMENTED,
    b"429": StatusCode.UNAVAILABLE,
    b"502": StatusCode.UNAVAILABLE,
    b"503": StatusCode.UNAVAILABLE,
    b"504": StatusCode.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class Status:
    """The end of a call, in the form that `baton.error_details.from_rpc_error` reads."""

    status_code: StatusCode
    message: str = ""
    trailers: Metadata = ()

    def code(self) -> StatusCode:
        """The status code."""
        return self.status_code

    def details(self) -> str:
        """The message."""
        return self.message

    def trailing_metadata(self) -> Metadata:
        """The trailers."""
        return self.trailers


class ClientCall:
    """A call on `stream`. The peer's messages are given to `push`; `status` has a result once the call is over."""

    # It has begun, and its messages are taken as they come.
    waits_for_message = False

    def __init__(self, stream: Stream, push: PushMessage) -> None:
        self.status: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._stream = stream
        self._push = push
        stream.push_messages_to(self._received)
        self._has_head = False
        self._announcements = 0
        self._trailers: Status | None = None

    # What the caller does.

    async def write(self, message: bytes) -> None:
        """Sends a message; waits first while the peer has not read enough. After the end it is dropped."""
        stream = self._stream
        if not stream.is_writable(len(message)):
            await wait_until_writable(stream, len(message))
        if not stream.closed:
            stream.write(message)

    def write_now(self, message: bytes) -> bool:
        """Sends a message unless the peer has not read enough; after the end it is dropped. False if `write` must.

        The first one of a turn of the event loop is written at once.
        """
        stream = self._stream
        if stream.closed:
            return True
        if not stream.is_writable(len(message)):
            return False
        stream.write(message)
        stream.flush()
        return True

    def cancel(self) -> None:
        """Tells the peer that the answer is not wanted any more."""
        self._end(Status(StatusCode.CANCELLED, "the call was cancelled on this side"), CANCEL)

    def forget(self) -> None:
        """Lets go of its stream, which refers to it: the connection is closed."""
        self._stream.push_messages_to(_ignore)

    # What the connection says.

    def receive_fields(self, fields: Sequence[Field], *, is_last: bool) -> None:
        """A header block of the answer: its head, or its trailers, or both in one. Raises StreamFailure for another."""
        values = dict(fields)
        if not self._has_head:
            http_status = values.get(b":status")
            if http_status is not None and http_status.startswith(b"1") and not is_last:
                self._announcements += 1
                if self._announcements > _MAX_ANNOUNCEMENTS:
                    raise StreamFailure(ENHANCE_YOUR_CALM, "the answer is announced too often")
                return
            self._has_head = True
            self._stream.content_length = content_length([value for name, value in fields if name == b"content-length"])
            if http_status != b"200":
                code = _OF_HTTP.get(http_status or b"", StatusCode.UNKNOWN)
                self._end(
                    Status(code, f"the answer has the HTTP status {(http_status or b'-').decode('latin-1')}"), CANCEL
                )
                return
        elif not is_last:
            raise StreamFailure(PROTOCOL_ERROR, "HEADERS is neither the head of the answer nor its end")
        if is_last:
            self._trailers = _status_of(values, fields)

    def start(self) -> None:
        """It has begun."""

    def end(self) -> None:
        """The peer has sent its last."""
        missing = Status(StatusCode.INTERNAL, "the answer ended without a status")
        self._end(self._trailers or missing, CANCEL)

    def fail(self, failure: MessageFailure) -> None:
        """Ends the call: the peer sent no message of gRPC's, or not one of this method's.

        A peer that fails a call may end it within a message: then its status stands.
        """
        said = self._trailers
        if said is None or said.status_code is StatusCode.OK:
            said = Status(failure.code, failure.details)
        self._end(said, CANCEL)

    def leave(self) -> None:
        """The peer has gone, or has reset the stream."""
        self._end(Status(StatusCode.UNAVAILABLE, "the peer has ended the stream"), CANCEL)

    def stop(self, reason: str) -> None:
        """The connection ends."""
        self._end(Status(StatusCode.UNAVAILABLE, reason), CANCEL)

    def _received(self, is_compressed: bool, message: bytes) -> None:
        if is_compressed:
            raise MessageFailure(StatusCode.INTERNAL, "a message is compressed, which was not asked for")
        if not self._stream.closed:
            self._push(message)

    def _end(self, status: Status, code: int) -> None:
        if not self.status.done():
            self.status.set_result(status)
        self._stream.reset(code)


def _ignore(is_compressed: bool, message: bytes) -> None:
    """Drops a message of a call that has ended."""


def _status_of(values: dict[bytes, bytes], fields: Sequence[Field]) -> Status:
    number = values.get(b"grpc-status", b"")
    if not number.isdigit():
        return Status(StatusCode.UNKNOWN, "the answer's trailers have no status")
    code = STATUS_CODES.get(int(number), StatusCode.UNKNOWN)
    message = percent_decoded(values.get(b"grpc-message", b""))
    try:
        return Status(code, message, decode(fields))
    except MalformedMetadata:
        return Status(code, message)
