"""Serving: a gRPC server for as long as a context is open, with health, reflection, and a drain at its end."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import Field

from rpc.access import Access
from rpc.channels import KEEPALIVE_OPTIONS, MAX_RECEIVE_BYTES
from rpc.config import Section
from rpc.errors import ConfigError
from rpc.health import SERVICE_NAME as HEALTH_NAME
from rpc.health import Health
from rpc.interceptors.authorizing import authorize
from rpc.interceptors.errors import answer_errors
from rpc.interceptors.logging import log_call
from rpc.interceptors.running import RunningCalls
from rpc.interceptors.tracing import trace_calls
from rpc.interceptors.wrap import WrapMethods
from rpc.settle import finish
from rpc.tls import TlsConfig, is_loopback
from rpc.tracing.tracer import NO_TRACER, Tracer

log = structlog.get_logger(__name__)

_OPTIONS: tuple[tuple[str, int], ...] = (
    *KEEPALIVE_OPTIONS,
    # Half of what our channels use; gRPC's default of 5 minutes would cut them off for pinging too often.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Otherwise a second process on the same port starts, and takes half of the calls.
    ("grpc.so_reuseport", 0),
)

# How long cancelled calls may take to clean up before the server is left to its fate.
_CLEANUP_SECONDS = 5.0


class ConnectionLimits(Section):
    """The key `connections`: what one connection may ask of a server."""

    max_message_bytes: int = Field(default=MAX_RECEIVE_BYTES, ge=1024, le=MAX_RECEIVE_BYTES, description="A request's.")
    max_streams: int = Field(default=4096, ge=1, description="Calls at once; more wait on the caller's side.")
    max_age_seconds: float = Field(
        default=0.0, ge=0, description="Then the caller connects again, and running calls go on; 0 is never."
    )

    def options(self) -> tuple[tuple[str, int], ...]:
        """As gRPC calls them."""
        limits = (
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_concurrent_streams", self.max_streams),
        )
        if not self.max_age_seconds:
            return limits
        return (*limits, ("grpc.max_connection_age_ms", int(self.max_age_seconds * 1e3)))


@dataclass(frozen=True, slots=True)
class Service:
    """A servicer, the generated function that adds it to a server, and its full name for reflection and health."""

    name: str
    add: Callable[[Any, aio.Server], None]
    servicer: object


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is listening. `address` is `host:port` with the port that was really taken."""

    address: str
    port: int


@asynccontextmanager
async def serve(
    listen: str,
    services: Sequence[Service],
    *,
    health: Health,
    tls: TlsConfig | None = None,
    announce_seconds: float = 0.0,
    drain_seconds: float = 30.0,
    tracer: Tracer = NO_TRACER,
    access: Access | None = None,
    connections: ConnectionLimits | None = None,
) -> AsyncGenerator[Server, None]:
    """Serves at `listen`, a `host:port` where port 0 is any free one, until the context is left.

    Its owner tells `health` when it is ready. At the end everything is NOT_SERVING; new calls are still taken for
    `announce_seconds`, so that balancers can hear of it first, and are refused from then on; running ones may go on for
    `drain_seconds` more, and then they are cancelled. When the context is left no servicer's code runs any
    more. `tracer` records a span for each call of a request. Raises ConfigError if it cannot listen there.
    """
    running = RunningCalls()
    wrappers = [running.counted, log_call, answer_errors, trace_calls(tracer), *([authorize(access)] if access else [])]
    options = (*_OPTIONS, *(connections or ConnectionLimits()).options())
    server = aio.server(interceptors=[WrapMethods(wrappers)], options=options)
    _add(server, services, health)
    port = _bind(server, listen, tls)
    try:
        await finish(server.start())
        yield Server(f"{listen.rpartition(':')[0]}:{port}", port)
    finally:
        health.close()
        await _stop(server, running, announce_seconds, drain_seconds)


def _add(server: aio.Server, services: Sequence[Service], health: Health) -> None:
    for service in services:
        service.add(service.servicer, server)
        # Reflection describes what has been imported, and generated services do not import their own description.
        import_module(service.add.__module__.removesuffix("_grpc"))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = [service.name for service in services]
    health.know(names)
    reflection.enable_server_reflection([*names, HEALTH_NAME, reflection.SERVICE_NAME], server)


def _bind(server: aio.Server, listen: str, tls: TlsConfig | None) -> int:
    host, _, port = listen.rpartition(":")
    # gRPC takes 99999 for port 34463, and a missing one for 443.
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise ConfigError(f"listen: {listen!r} is not host:port")
    if tls is None and not is_loopback(host):
        log.warning("listens without TLS beyond this host", listen=listen)
    try:
        if tls is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, tls.server_credentials())
    except RuntimeError as error:
        raise ConfigError(f"listen: cannot listen on {listen!r}; is the port taken?") from error


async def _stop(server: aio.Server, running: RunningCalls, announce_seconds: float, drain_seconds: float) -> None:
    try:
        if announce_seconds:
            await asyncio.sleep(announce_seconds)
        # gRPC's core writes into what gRPC's own task owns, and a cancelled stop() would cancel that task.
        await asyncio.shield(server.stop(drain_seconds))
    except asyncio.CancelledError:
        # The second signal: no more waiting.
        await asyncio.shield(server.stop(None))
        raise
    finally:
        await _wait_for_cleanup(running)


async def _wait_for_cleanup(running: RunningCalls) -> None:
    try:
        await running.ended(_CLEANUP_SECONDS)
    except TimeoutError:
        log.warning("calls did not end when cancelled", calls=running.count)
