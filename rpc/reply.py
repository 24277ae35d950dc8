"""`reply()` for the contexts of grpc.aio, as those of our own server have it (baton_http2/server/reply.py).

Calls that share a stream have one with the same face (engine_protocol/multiplex).
"""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from baton_http2.server.reply import Reply
from rpc.interceptors.calls import as_coroutine


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
