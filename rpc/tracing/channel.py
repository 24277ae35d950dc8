"""Channels whose calls carry the current trace context.

A wrapper around a channel's methods and no client interceptor: gRPC runs an intercepted call in one more task, and
passes each message of its stream through one more generator. benchmarks/telemetry/trace_propagation.py measures both.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc
from grpc import aio
from typing_extensions import Self

from baton.connection.tracing import TRACEPARENT
from baton.errors import Unavailable
from rpc.tracing.span import current_span

# gRPC's multi-callables have four unrelated classes; they are wrapped alike here.
MultiCallable = Callable[..., Any]


class TracedChannel(aio.Channel):
    """Wraps a channel. Calls within a span carry the span's context as metadata.

    A call on a channel that is closed raises Unavailable.
    """

    def __init__(self, channel: aio.Channel) -> None:
        self._channel = channel

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.__aexit__(kind, error, trace)

    async def close(self, grace: float | None = None) -> None:
        """Ends running calls after `grace` seconds."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The connection's state now."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Returns when the connection's state has changed."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Returns when it is connected."""
        await self._channel.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return _traced(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return _traced(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return _traced(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return _traced(self._channel.stream_stream(*arguments, **options))


def _traced(call: MultiCallable) -> MultiCallable:
    def start(*request: Any, metadata: Any = None, **options: Any) -> Any:
        context = current_span().metadata
        if context:
            given = tuple(metadata or ())
            metadata = given if TRACEPARENT in [key for key, _ in given] else (*given, *context)
        try:
            return call(*request, metadata=metadata, **options)
        except aio.UsageError as error:
            raise Unavailable("the channel is closed") from error

    return start
