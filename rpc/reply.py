"""The way back to the caller of one call, as the server that runs the call makes it: `context.reply()`.

`Reply` is that of a call with a connection or a stream of its own. Calls that share a stream have one with the same
face (engine_protocol/multiplex). grpc.aio's contexts have none: `AddReplies` gives them one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

import grpc
from grpc import aio

from rpc.interceptors.behaviour import as_coroutine

Item = TypeVar("Item", covariant=True)

Trailers = tuple[tuple[str, str | bytes], ...]


class Wire(Protocol):
    """Writes the serialized messages of one call without waiting."""

    @property
    def connection(self) -> Hashable:
        """The same for all wires that are flushed together."""

    def write(self, message: bytes) -> bool:
        """Sends a message; does nothing once the call is over. False if there is no room for another one yet."""

    def flush(self) -> None:
        """Hands what was written to the connection, though this turn of the event loop goes on."""


class Source(Protocol[Item]):
    """Gives the items of one call, which are pulled."""

    async def subscribe(self, ready: Callable[[], None]) -> None:
        """Begins, and calls `ready` on the event loop whenever `pull` has something new; at once, if it has already."""

    def pull(self) -> tuple[Sequence[Item], bool]:
        """The items since the last time, and whether they were the last. Raises what ended the source, if it failed."""


class Reply:
    """The way back to one caller. `open_wire` is None where the server cannot write without waiting."""

    __slots__ = ("_open_wire", "set_trailing_metadata", "write")

    def __init__(
        self,
        write: Callable[[Any], Awaitable[None]],
        set_trailing_metadata: Callable[[Trailers], None],
        open_wire: Callable[[], Wire] | None = None,
    ) -> None:
        self.write = write
        self.set_trailing_metadata = set_trailing_metadata
        self._open_wire = open_wire

    def open_wire(self) -> Wire | None:
        """Sends the answer's headers, and gives its wire; None if messages can only be sent by `write`, which waits."""
        return None if self._open_wire is None else self._open_wire()

    async def write_from(self, source: Source[Item], message_of: Callable[[Sequence[Item]], Any]) -> None:
        """Sends what a source gives until its last items, as messages. Raises what the source raises."""
        changed = asyncio.Event()
        await source.subscribe(changed.set)
        is_last = False
        while not is_last:
            await changed.wait()
            changed.clear()
            items, is_last = source.pull()
            if items:
                await self.write(message_of(items))


class AddReplies(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Gives grpc.aio's contexts a `reply`, in methods that answer one message with several."""

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """The method's handler. Asked for once a method: the interceptor around this one keeps it."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_stream is None:
            return handler
        behaviour = as_coroutine(handler.unary_stream)

        async def replying(request: Any, context: Any) -> None:
            await behaviour(request, ReplyingContext(context))  # type: ignore[arg-type]  # all of it by delegation

        return grpc.unary_stream_rpc_method_handler(
            replying,
            handler.request_deserializer,
            handler.response_serializer,
        )


class ReplyingContext:
    """A context of grpc.aio's with a `reply`; the rest of it is grpc.aio's."""

    __slots__ = ("_context",)

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def reply(self) -> Reply:
        """The way back to the caller, which only has writes that wait."""
        return Reply(self._context.write, self._context.set_trailing_metadata)
