"""The methods of a server as they are called, and what is known of a call before its method is."""

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import grpc
from grpc import StatusCode, aio

from baton_http2.security import AuthContext
from baton_http2.server.peer import Peer
from baton_http2.wire.metadata import Metadata

Context = aio.ServicerContext[Any, Any]

# Returns the response, or writes the responses to the context and returns None.
Behaviour = Callable[[Any, Context], Awaitable[Any]]


class CallDetails(grpc.HandlerCallDetails):
    """A call as an interceptor sees it before it has a handler."""

    def __init__(self, method: str, invocation_metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = invocation_metadata  # type: ignore[assignment]  # in its stubs without bytes


class Caller:
    """The caller that begins a call, as far as its headers and its connection say."""

    __slots__ = ("_metadata", "_peer")

    def __init__(self, metadata: Metadata, peer: Peer) -> None:
        self._metadata = metadata
        self._peer = peer

    def invocation_metadata(self) -> Metadata:
        """The metadata that the caller sent beside its request."""
        return self._metadata

    def auth_context(self) -> AuthContext:
        """The identity that the caller has proven."""
        return self._peer.auth_context


# Of a method and its caller: the object that is served instead of the request; None if the call is allowed.
Refuse = Callable[[str, Caller], object | None]


@dataclass(frozen=True, slots=True)
class Method:
    """A handler, as it is called."""

    behaviour: Behaviour
    deserialize: Callable[[bytes | bytearray], Any]
    serialize: Callable[[Any], bytes]
    takes_stream: bool
    gives_stream: bool


@lru_cache(maxsize=1024)
def method_of(handler: "grpc.RpcMethodHandler[Any, Any]") -> Method:
    """The method that calls a handler, made once."""
    plain = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    assert plain is not None
    return Method(
        as_coroutine(plain),
        handler.request_deserializer or bytes,
        handler.response_serializer or bytes,
        handler.request_streaming,
        handler.response_streaming,
    )


async def refuse_unimplemented(_request: Any, context: Context) -> None:
    """Ends the call with UNIMPLEMENTED."""
    await context.abort(StatusCode.UNIMPLEMENTED, "Method not implemented!")


def as_coroutine(method: Callable[..., Any], otherwise: Behaviour = refuse_unimplemented) -> Behaviour:
    """A servicer's method as a Behaviour. A synchronous method is generated: `otherwise` is called in its place."""
    if inspect.iscoroutinefunction(method):
        return method
    if inspect.isasyncgenfunction(method):
        return _write_all(method)
    return otherwise


def _write_all(generate: Callable[..., AsyncGenerator[Any, None]]) -> Behaviour:
    # Writes instead of yielding: a cancelled write then closes the generator here, in the call's own task.
    async def write_all(request: Any, context: Context) -> None:
        async with aclosing(generate(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all
