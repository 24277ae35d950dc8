"""Channels to peers, with the options that all of Baton's connections share, and the current trace context.

Also calls that may fail: something else, such as the end of a lease, does their work later.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import grpc
import structlog
from grpc import aio
from typing_extensions import Self

from baton.calls import unary
from baton.connection.settings import CHANNEL_OPTIONS
from baton.connection.tracing import TRACEPARENT
from baton.errors import BatonError, Unavailable
from rpc.auth.tls import TlsConfig
from rpc.timeouts import BEST_EFFORT_SECONDS, BEST_EFFORT_UNHEALTHY_SECONDS
from rpc.tracing.span import current_span
from runtime.aio import retrieved


def open_channel(
    address: str, tls: TlsConfig | None = None, *, replaced_options: Mapping[str, int] | None = None
) -> aio.Channel:
    """A channel to `host:port`: `async with open_channel(address) as channel: ...`. Connects on first use.

    With `tls` the peer's certificate must be signed by its `ca`, and this process presents its `cert`. Raises
    ConfigError if a file cannot be read. `replaced_options` are for peers outside of Baton. Calls made within a span
    carry its context.
    """
    options: dict[str, int | str] = {**dict(CHANNEL_OPTIONS), **(replaced_options or {})}
    if tls is None:
        return _open(address, None, options)
    return _open(address, tls.channel_credentials(), {**options, **_expected(tls)})


# Opens a channel to an address, always with the same credentials.
Dial = Callable[[str], aio.Channel]


def dialer(tls: TlsConfig | None) -> Dial:
    """Like `open_channel`, with the files read now, so that later calls cannot fail. Raises ConfigError."""
    credentials = None if tls is None else tls.channel_credentials()
    options: dict[str, int | str] = {**dict(CHANNEL_OPTIONS), **(_expected(tls) if tls else {})}
    closing = asyncio.Lock()
    return lambda address: TracedChannel(connect(address, credentials, options), closing)


def _open(address: str, credentials: grpc.ChannelCredentials | None, options: Mapping[str, int | str]) -> aio.Channel:
    return TracedChannel(connect(address, credentials, options))


def connect(address: str, credentials: grpc.ChannelCredentials | None, options: Mapping[str, int | str]) -> aio.Channel:
    """The one place where grpcio opens a connection; a simulation puts its own in its place."""
    if credentials is None:
        return aio.insecure_channel(address, options=tuple(options.items()))
    return aio.secure_channel(address, credentials, options=tuple(options.items()))


def _expected(tls: TlsConfig) -> dict[str, str]:
    return {"grpc.ssl_target_name_override": tls.server_name} if tls.server_name else {}


log = structlog.get_logger(__name__)

Response = TypeVar("Response")


async def best_effort(
    start: "Callable[[float], aio.UnaryUnaryCall[Any, Response]]", *, healthy: bool
) -> Response | None:
    """The response of `start(timeout_seconds)`, a unary call; None if the peer fails or does not answer in time.

    A peer that is not healthy gets less time. A cancelled caller still waits for the response, at most as long, and is
    cancelled then.
    """
    seconds = BEST_EFFORT_SECONDS if healthy else BEST_EFFORT_UNHEALTHY_SECONDS
    try:
        # Within: the start of a call on a channel that is closed fails at once.
        calling = retrieved(asyncio.ensure_future(unary(start(seconds))))
        return await asyncio.shield(calling)
    except BatonError as error:
        log.debug("best-effort call failed", error=error.message)
        return None
    except asyncio.CancelledError:
        await asyncio.wait([calling], timeout=seconds)
        raise


# gRPC's multi-callables have four unrelated classes; they are wrapped alike here.
MultiCallable = Callable[..., Any]


class TracedChannel(aio.Channel):
    """Wraps a channel. Calls within a span carry the span's context as metadata.

    A call on a channel that is closed raises Unavailable. It is no client interceptor: gRPC runs an intercepted call in
    one more task, and passes each message of its stream through one more generator: 18 us a call.

    Channels with the same `closing` are closed one after the other: for each of them grpc.aio looks at all tasks of the
    process, and the event loop does other work in between.
    """

    def __init__(self, channel: aio.Channel, closing: asyncio.Lock | None = None) -> None:
        self._channel = channel
        self._closing = closing or asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Ends running calls after `grace` seconds."""
        async with self._closing:
            await self._channel.close(grace)
            await asyncio.sleep(0)

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
