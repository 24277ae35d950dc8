"""A real server of InferenceService whose methods a test writes, with a channel to it."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from grpc import aio

from baton.inference.v1 import inference_service_pb2_grpc as inference
from engine_protocol.multiplex.service import multiplex
from rpc.channels import open_channel
from rpc.health import Health
from rpc.server import ConnectionLimits, Server, ServerOptions, Service, serve
from rpc.tracing.tracer import NO_TRACER, Tracer

NAME = "baton.inference.v1.InferenceService"


@dataclass(frozen=True, slots=True)
class Scripted:
    """A running server, and a channel to it."""

    server: Server
    health: Health
    channel: aio.Channel
    stub: inference.InferenceServiceStub


def service(methods: dict[str, Callable[..., Any]]) -> Service:
    """InferenceService with these methods; the others are left unimplemented."""
    servicer = inference.InferenceServiceServicer()
    for name, method in methods.items():
        setattr(servicer, name, method)
    return Service(NAME, inference.add_InferenceServiceServicer_to_server, servicer)


@asynccontextmanager
async def scripted(
    drain_seconds: float = 1.0,
    tracer: Tracer = NO_TRACER,
    connections: ConnectionLimits | None = None,
    is_multiplexed: bool = False,
    **methods: Callable[..., Any],
) -> AsyncGenerator[Scripted, None]:
    """Serves `methods`, functions of (request, context), until the context is left; on shared streams too if asked."""
    health = Health()
    async with (
        serve(
            "127.0.0.1:0",
            [service(methods)],
            health=health,
            drain_seconds=drain_seconds,
            options=ServerOptions(
                tracer=tracer,
                connections=connections or ConnectionLimits(),
                around=[multiplex([service(methods)])] if is_multiplexed else (),
            ),
        ) as server,
        open_channel(server.address) as channel,
    ):
        health.set("", True)
        yield Scripted(server, health, channel, inference.InferenceServiceStub(channel))


async def status_of(call: Any) -> aio.AioRpcError:
    """The error that a call ends with, after any messages."""
    try:
        if hasattr(call, "__await__"):
            await call
        else:
            async for _ in call:
                pass
    except aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")


def raw(channel: aio.Channel, method: str, *, streams: bool) -> Callable[[bytes], Any]:
    """A method called with bytes of the test's choice."""
    kind = channel.unary_stream if streams else channel.unary_unary
    return kind(f"/{NAME}/{method}", request_serializer=None, response_deserializer=None)
