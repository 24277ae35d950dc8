"""A call with a stream of its own, for its caller: the same face as that of a call that shares one."""

from collections.abc import AsyncIterator, Awaitable
from typing import Any, Generic, Protocol, TypeVar

from baton.calls import cancel, stream
from engine_protocol.lane import TokenSink

Response = TypeVar("Response", covariant=True)


class StreamingCall(Protocol[Response]):
    """A running call with many responses, which raises BatonErrors. The owner closes it, which stops it on the peer."""

    def __aiter__(self) -> AsyncIterator[Response]:
        """Itself."""

    def set_sink(self, sink: TokenSink | None) -> None:
        """Pushes tokens into `sink` while a response is waited for, where they can come alone; None ends that."""

    def stop(self) -> None:
        """Cancels the call; its reader finds its end."""

    async def aclose(self) -> None:
        """Cancels the call, if it runs."""


class SeparateCall(AsyncIterator[Response], Generic[Response]):
    """A call of grpc.aio, whose tokens come in responses alone."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._responses = stream(call)
        self._is_stopped = False

    def __anext__(self) -> Awaitable[Response]:
        """The next response. Raises a BatonError if the call fails."""
        if self._is_stopped:
            raise StopAsyncIteration
        return self._responses.__anext__()

    def set_sink(self, sink: TokenSink | None) -> None:
        """Changes nothing: no token comes alone."""

    def stop(self) -> None:
        """Cancels the call; its reader, which is the caller of this, finds its end."""
        self._is_stopped = True
        cancel(self._call)

    def cancel(self) -> None:
        """Cancels the call, whose reader gets to know it as an error."""
        cancel(self._call)

    async def aclose(self) -> None:
        """Cancels the call, if it runs."""
        await self._responses.aclose()
        # Also one whose responses were never asked for.
        self.cancel()
