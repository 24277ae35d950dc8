"""The interceptor of every server: wraps each method, once, in functions that see calls and never single messages."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc
from grpc import aio

from baton_http2.server.reply import Reply
from rpc.interceptors.calls import Wrapper, as_coroutine
from rpc.interceptors.reading import Reader, refuse_malformed

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_CONSTRUCTORS: dict[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class WrapMethods(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Wraps every method in `wrappers`, the first outermost; `reader` reads their requests or refuses them."""

    def __init__(self, wrappers: Sequence[Wrapper], reader: Reader) -> None:
        self._reader = reader
        self._wrappers = (reader.read, *wrappers, refuse_malformed)
        self._handlers: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The wrapped handler of a call; made at the method's first call, and kept. None for an unknown method."""
        method = handler_call_details.method
        if method in self._handlers:
            return self._handlers[method]
        handler = await continuation(handler_call_details)
        if handler is not None:
            handler = self._handlers[method] = self.wrap(method, handler)
        return handler

    def wrap(self, method: str, handler: Handler) -> Handler:
        """The handler of a method, with everything around it."""
        plain = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        assert plain is not None
        behaviour = as_coroutine(plain)
        for wrapper in reversed(self._wrappers):
            behaviour = wrapper(method, behaviour)
        constructor = _CONSTRUCTORS[handler.request_streaming, handler.response_streaming]
        deserializer = self._reader.deserializer(handler.request_deserializer)
        return constructor(behaviour, deserializer, handler.response_serializer)


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
