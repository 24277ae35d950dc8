"""The answer to a stream that is not a call: another protocol's request, or one whose headers are too large."""

from grpc import StatusCode

from baton_http2.limits import EXCEEDED
from baton_http2.stream import Stream
from baton_http2.wire.hpack import literal
from baton_http2.wire.messages import MessageFailure
from baton_http2.wire.metadata import RESPONSE, status_fields
from baton_http2.wire.request import RequestHead


class Refusal:
    """The answer to what is not a call: another protocol's request, or one whose headers were too large.

    It needs no task.
    """

    waits_for_message = False

    def __init__(self, stream: Stream, head: RequestHead | None) -> None:
        self._stream = stream
        self._head = head
        # Whatever it is, it is not kept.
        stream.ignores_input = True

    def start(self) -> None:
        """Answers at once where nothing more is needed."""
        if self._head is None:
            EXCEEDED.labels("header_lists").inc()
            trailers = status_fields(StatusCode.RESOURCE_EXHAUSTED.value[0], "metadata is too large", ())
            self._stream.finish(RESPONSE + trailers)

    def end(self) -> None:
        """The request is complete."""
        if self._head is not None:
            self._answer(self._head.http_status)

    def fail(self, _failure: MessageFailure) -> None:
        """It is no message, as was to be expected."""
        self.end()

    def leave(self) -> None:
        """Nothing runs."""

    def stop(self, _reason: str) -> None:
        """Nothing runs."""

    def _answer(self, http_status: int) -> None:
        if self._stream.started:
            return
        self._stream.start(literal(b":status", b"%d" % http_status) + literal(b"content-type", b"text/plain"))
        self._stream.write_raw(b"this is a gRPC server\n")
        self._stream.finish(status_fields(StatusCode.UNIMPLEMENTED.value[0], "", ()))
