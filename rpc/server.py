"""A gRPC server as a context manager, with health, reflection, and a drain at its end."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, TypeAlias

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import _async as async_reflection
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from pydantic import Field

from baton.connection.credentials import is_loopback
from baton.connection.settings import KEEPALIVE_OPTIONS, MAX_RECEIVE_BYTES
from baton.errors import ConfigError
from baton_http2.input_budget import InputBudget, InputLimits
from baton_http2.limits import METRICS, UNREAD_OUTPUT_BYTES, Http2Limits, ServerLimits
from baton_http2.output_budget import OutputBudget
from baton_http2.server.methods import Caller, Refuse
from baton_http2.server.server import RESERVED_DESCRIPTORS, Http2Server
from baton_http2.sockets.descriptors import OpenConnections
from rpc.auth.access import Access
from rpc.auth.tls import TlsConfig
from rpc.health import SERVICE_NAME as HEALTH_NAME
from rpc.health import Health
from rpc.interceptors.calls import RecordArrivals, RunningCalls, authorize
from rpc.interceptors.errors import answer_errors
from rpc.interceptors.logging import log_call
from rpc.interceptors.reading import CHANNEL_OPTIONS as READ_OPTIONS
from rpc.interceptors.reading import MalformedRequest, Reader, ReadLimits, TextLimitsOf
from rpc.interceptors.tracing import trace_calls
from rpc.interceptors.wrap import AddReplies, WrapMethods
from rpc.timeouts import CLEANUP_SECONDS, MIN_PING_SECONDS
from rpc.tracing.tracer import NO_TRACER, Tracer
from runtime.aio import run_to_completion
from runtime.config import Section
from runtime.network import split_address
from runtime.telemetry.metrics import REGISTRY

log = structlog.get_logger(__name__)

for _metric in METRICS:
    REGISTRY.register(_metric)

_OPTIONS: tuple[tuple[str, int], ...] = (
    *KEEPALIVE_OPTIONS,
    # gRPC's default of 5 minutes would close Baton's own connections for pinging too often.
    ("grpc.http2.min_ping_interval_without_data_ms", int(MIN_PING_SECONDS * 1e3)),
    *READ_OPTIONS,
)

AnyServer: TypeAlias = "aio.Server | Http2Server"


class ConnectionLimits(Section):
    """The key `connections`: limits of one connection."""

    max_message_bytes: int = Field(default=MAX_RECEIVE_BYTES, ge=1024, le=MAX_RECEIVE_BYTES, description="A request's.")
    max_streams: int = Field(default=4096, ge=1, description="Calls at once; more wait on the caller's side.")
    max_message_fields: int = Field(
        default=65_536, ge=1024, description="Of a request over 64 KiB, at every depth; 16 numbers of a list are one."
    )
    compressed_requests: bool = Field(
        default=False, description="Whether gzip is accepted; up to max_message_bytes when decompressed."
    )
    max_age_seconds: float = Field(
        default=0.0, ge=0, description="Then the caller connects again, and running calls go on; 0 is never."
    )

    input: InputLimits = Field(default=InputLimits(), description="Of requests that are not read yet.")
    unread_output_bytes: int = Field(
        default=UNREAD_OUTPUT_BYTES,
        ge=2**20,
        description="Of all answers that are not read yet; then the calls of the slowest readers end.",
    )
    reserved_descriptors: int = Field(
        default=RESERVED_DESCRIPTORS,
        ge=0,
        description="File descriptors that connections of clients leave free, at most a quarter of the limit.",
    )
    http2: Http2Limits = Field(default=Http2Limits(), description="Of the server `http2` alone.")

    def options(self) -> tuple[tuple[str, int], ...]:
        """The gRPC channel options."""
        limits = (
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_concurrent_streams", self.max_streams),
        )
        if not self.max_age_seconds:
            return limits
        return (*limits, ("grpc.max_connection_age_ms", int(self.max_age_seconds * 1e3)))

    def reading(self) -> ReadLimits:
        """The limits on reading one request."""
        return ReadLimits(self.max_message_bytes, self.max_message_fields, self.compressed_requests)

    def server_limits(self) -> ServerLimits:
        """The same limits, for our own server."""
        return ServerLimits(
            self.http2,
            self.max_message_bytes,
            self.max_streams,
            self.max_age_seconds,
            self.compressed_requests,
            input=self.input,
            unread_output_bytes=self.unread_output_bytes,
        )


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """The limits that a process' servers share: memory for requests and for answers that are not read, descriptors
    for connections, and patience.
    """

    input: InputBudget
    output: OutputBudget
    connections: OpenConnections
    slow_reader_seconds: float

    @classmethod
    def of(cls, limits: ConnectionLimits) -> "SharedLimits":
        """The limits that are configured."""
        connections = OpenConnections(limits.reserved_descriptors)
        output = OutputBudget(limits.unread_output_bytes)
        return cls(InputBudget(limits.input), output, connections, limits.http2.slow_reader_seconds)


# Which implementation serves: grpc.aio, or our own HTTP/2.
ServerKind = Literal["grpcio", "http2"]
DEFAULT_SERVER: ServerKind = "http2"


def default_server() -> ServerKind:
    """The default of the configuration key `server`."""
    return DEFAULT_SERVER


@dataclass(frozen=True, slots=True)
class Service:
    """A servicer, the generated function that adds it to a server, and its full name for reflection and health."""

    name: str
    add: Callable[[Any, Any], None]
    servicer: object


# Makes a service whose calls are calls of other services' methods, which it wraps by the server's interceptor.
ServiceAround: TypeAlias = Callable[[WrapMethods, ConnectionLimits], Service]


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is listening. `address` is `host:port` with the actual port."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server. `shared` is for several servers of a process, and `kind` chooses the implementation.

    With `shares_port` other processes may listen at the same port, and the kernel spreads the connections over them.
    `sockets`, if there are any, are bound to the address already; `http2` alone can use them. `tracer` records a span
    for each call of a request. `texts` limits the texts of large requests before they are parsed. `around` makes
    services that call others' methods, as engine_protocol/multiplex does.
    """

    tls: TlsConfig | None = None
    access: Access | None = None
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    shared: SharedLimits | None = None
    kind: ServerKind | None = None
    shares_port: bool = False
    sockets: Sequence[socket.socket] = ()
    tracer: Tracer = NO_TRACER
    texts: TextLimitsOf | None = None
    around: Sequence[ServiceAround] = ()

    def interceptor(self, running: RunningCalls, reading: ThreadPoolExecutor) -> WrapMethods:
        """The interceptor of all calls, whose requests are parsed by `reading`."""
        traced = trace_calls(self.tracer)
        allowed = [authorize(self.access)] if self.access else []
        wrappers = [running.counted, log_call, answer_errors, traced, *allowed]
        return WrapMethods(wrappers, Reader(self.connections.reading(), reading, self.texts))


_DEFAULTS = ServerOptions()


@asynccontextmanager
async def serve(
    listen: str,
    services: Sequence[Service],
    *,
    health: Health,
    announce_seconds: float = 0.0,
    drain_seconds: float = 30.0,
    options: ServerOptions = _DEFAULTS,
) -> AsyncGenerator[Server, None]:
    """Serves at `listen`, a `host:port` where port 0 is any free port, until the context is left.

    The caller sets `health` when it is ready. At the end everything becomes NOT_SERVING. New calls are accepted for
    another `announce_seconds`, so that load balancers notice first; running calls have `drain_seconds` more, and are
    then cancelled. After that no servicer's code runs. Raises ConfigError if it cannot listen there.
    """
    running = RunningCalls()
    # One thread: parsing holds the interpreter's lock, and several threads would hold it for longer.
    reading = ThreadPoolExecutor(1, thread_name_prefix="read-requests")
    interceptor = options.interceptor(running, reading)
    is_http2 = (options.kind or default_server()) == "http2"
    server = _http2_server(interceptor, options) if is_http2 else _grpcio_server(interceptor, options)
    _add(server, (*services, *(make(interceptor, options.connections) for make in options.around)), health)
    port = _bind(server, listen, options)
    try:
        await run_to_completion(server.start())
        yield Server(f"{listen.rpartition(':')[0]}:{port}", port)
    finally:
        health.close()
        try:
            await _stop(server, running, announce_seconds, drain_seconds)
        finally:
            reading.shutdown(wait=False, cancel_futures=True)


def _http2_server(interceptor: WrapMethods, options: ServerOptions) -> AnyServer:
    shared = options.shared or SharedLimits.of(options.connections)
    return Http2Server(
        [interceptor],
        options.connections.server_limits(),
        refuse=_refuse_by(options.access),
        input=shared.input,
        output=shared.output,
        open_connections=shared.connections,
    )


def _grpcio_server(interceptor: WrapMethods, options: ServerOptions) -> AnyServer:
    # Not by default: a second server could listen on the same port by mistake, and would get half of the calls.
    sharing = ("grpc.so_reuseport", int(options.shares_port))
    interceptors = [RecordArrivals(), interceptor, AddReplies()]
    return aio.server(interceptors=interceptors, options=(*_OPTIONS, sharing, *options.connections.options()))


def _refuse_by(access: Access | None) -> Refuse | None:
    """Refuses what `access` does not allow: the interceptors get the error in the request's place, and raise it."""
    if access is None:
        return None

    def refuse(method: str, caller: Caller) -> MalformedRequest | None:
        error = access.refusal(method, caller)
        return MalformedRequest(error) if error else None

    return refuse


def _add(server: AnyServer, services: Sequence[Service], health: Health) -> None:
    for service in services:
        service.add(service.servicer, server)
        # Reflection describes what has been imported, and generated services do not import their own description.
        import_module(service.add.__module__.removesuffix("_grpc"))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = [service.name for service in services]
    health.know(names)
    # Not enable_server_reflection, which takes a server that it does not know for a synchronous one.
    reflector = async_reflection.ReflectionServicer([*names, HEALTH_NAME, reflection.SERVICE_NAME])
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflector, server)


def _bind(server: AnyServer, listen: str, options: ServerOptions) -> int:
    host, _ = split_address(listen, "listen")
    tls = options.tls
    if tls is None and not is_loopback(host):
        log.warning("listening beyond this host without TLS", listen=listen)
    try:
        if isinstance(server, Http2Server) and options.sockets:
            return server.use(options.sockets, tls.server_context() if tls else None)
        if isinstance(server, Http2Server):
            return server.bind(listen, tls.server_context() if tls else None, shares_port=options.shares_port)
        if tls is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, tls.server_credentials())
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"listen: cannot listen on {listen!r}; is the port taken?") from error


async def _stop(server: AnyServer, running: RunningCalls, announce_seconds: float, drain_seconds: float) -> None:
    try:
        if announce_seconds:
            await asyncio.sleep(announce_seconds)
        # A cancelled stop() would cancel gRPC's own task, which gRPC's core still writes to.
        await asyncio.shield(server.stop(drain_seconds))
    except asyncio.CancelledError:
        # The second signal: stop at once.
        await asyncio.shield(server.stop(None))
        raise
    finally:
        await _wait_for_cleanup(running)


async def _wait_for_cleanup(running: RunningCalls) -> None:
    try:
        await running.ended(CLEANUP_SECONDS)
    except TimeoutError:
        log.warning("calls did not end when cancelled", calls=running.count)
