"""The interceptor of every server: wraps each method, once, in functions that see calls and never single messages."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc
from grpc import aio

from rpc.arrival import note_arrival
from rpc.interceptors.behaviour import Wrapper, as_coroutine
from rpc.interceptors.parsing import refuse_malformed, tolerant

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_CONSTRUCTORS: dict[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class WrapMethods(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Wraps every method in `wrappers`, the first outermost, and refuses requests that cannot be parsed."""

    def __init__(self, wrappers: Sequence[Wrapper]) -> None:
        self._wrappers = (*wrappers, refuse_malformed)
        self._handlers: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The wrapped handler of a call; made at the method's first call, and kept. None for an unknown method."""
        # In the call's own task, and before its message is read.
        note_arrival()
        method = handler_call_details.method
        if method in self._handlers:
            return self._handlers[method]
        handler = await continuation(handler_call_details)
        if handler is not None:
            handler = self._handlers[method] = self._wrap(method, handler)
        return handler

    def _wrap(self, method: str, handler: Handler) -> Handler:
        plain = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        assert plain is not None
        behaviour = as_coroutine(plain)
        for wrapper in reversed(self._wrappers):
            behaviour = wrapper(method, behaviour)
        constructor = _CONSTRUCTORS[handler.request_streaming, handler.response_streaming]
        deserializer = handler.request_deserializer
        if not handler.request_streaming:
            deserializer = tolerant(deserializer)
        return constructor(behaviour, deserializer, handler.response_serializer)
