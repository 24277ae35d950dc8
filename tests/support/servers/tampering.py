"""A real worker whose replies a test changes on their way to the router: one that is broken, hostile, or newer."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc import aio
from support.cluster.in_process import Bench

from baton.engine.v1 import (
    decode_pb2,
    diffuse_pb2,
    embed_pb2,
    encode_pb2,
    handoff_pb2,
    multiplex_pb2,
    prefill_pb2,
    worker_pb2,
)
from baton.errors import BatonError
from discovery.memory import MemoryRegistry
from discovery.record import MULTIPLEX
from discovery.registry import WorkerRecord
from engine_protocol.multiplex.metadata import to_messages
from rpc.channels import open_channel
from rpc.health import Health
from rpc.server import Service, serve
from rpc.status import to_status
from services.config import WorkerConfig
from services.server import Worker, host_worker

_FILES = (decode_pb2, diffuse_pb2, embed_pb2, encode_pb2, handoff_pb2, prefill_pb2, worker_pb2)
_SERVICES = [service for file in _FILES for service in file.DESCRIPTOR.services_by_name.values()]
_MULTIPLEX = "/baton.engine.v1.MultiplexService/Multiplex"


@dataclass(frozen=True)
class Ends:
    """The end of the call with a status, instead of a reply."""

    code: int
    message: str = "broken"
    trailers: tuple[tuple[str, str | bytes], ...] = ()

    @classmethod
    def by(cls, error: BatonError) -> "Ends":
        """With the status that Baton's own workers send of an error."""
        status: Any = to_status(error)
        return cls(status.code.value[0], status.details, tuple(status.trailing_metadata))


class Silence:
    """Nothing more, not even an end."""


SILENCE = Silence()
Reply = Message | bytes | Ends | Silence
# From a reply of a method to what comes instead of it.
Change = Callable[[Any], Iterable[Reply]]


@dataclass
class Tampered:
    """A worker of the bench. `changes` are by the methods' names, such as `Decode`, and may be set at any time."""

    record: WorkerRecord
    changes: dict[str, Change] = field(default_factory=dict)
    change_all: Callable[[Message], None] | None = None  # in place, of every reply
    change_stream: Callable[[multiplex_pb2.MultiplexResponse], None] | None = None  # in place
    calls: Counter[str] = field(default_factory=Counter)
    worker: Worker | None = None

    def replies(self, path: str, wire: bytes) -> Iterable[Reply]:
        """The replacement of a reply."""
        method = _METHODS[path]
        message = method.output_type._concrete_class()
        message.ParseFromString(wire)
        if self.change_all is not None:
            self.change_all(message)
        change = self.changes.get(method.name)
        return [message] if change is None else change(message)


_METHODS = {f"/{service.full_name}/{method.name}": method for service in _SERVICES for method in service.methods}


@asynccontextmanager
async def tampered(
    running: Bench, config: WorkerConfig, *, multiplexed: bool, **record: Any
) -> AsyncIterator[Tampered]:
    """Registers the worker beside those of the bench, and waits until the router can use it.

    Unless it is `multiplexed`, each call is one of its own.
    """
    own = MemoryRegistry("test")
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(host_worker(config, own))
        channel = await stack.enter_async_context(open_channel(worker.address))
        found = own.workers()[0]
        if not multiplexed:
            stated = tuple(name for name in found.capabilities if name != MULTIPLEX)
            found = replace(found, capabilities=stated)
        proxy = Tampered(replace(found, **record), worker=worker)
        services = [_service(proxy, channel, service) for service in _SERVICES]
        services.append(Service("baton.engine.v1.MultiplexService", _multiplex(proxy, channel), None))
        health = Health()
        serving = serve("127.0.0.1:0", services, health=health, drain_seconds=0)
        server = await stack.enter_async_context(serving)
        health.set("", True)
        before = len(running.cluster.workers)
        proxy.record = replace(proxy.record, address=server.address)
        await stack.enter_async_context(running.registry.register(proxy.record))
        await running.ready(before + 1)
        yield proxy


def _service(proxy: Tampered, channel: aio.Channel, service: Any) -> Service:
    handlers = {}
    for method in service.methods:
        path = f"/{service.full_name}/{method.name}"
        if method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(_forward_stream(proxy, channel, path))
        else:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(_forward(proxy, channel, path))

    def add(servicer: object, server: Any) -> None:
        del servicer
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service.full_name, handlers)])

    return Service(service.full_name, add, None)


def _forward(proxy: Tampered, channel: aio.Channel, path: str) -> Callable[[bytes, Any], Any]:
    async def forward(request: bytes, context: Any) -> bytes:
        proxy.calls[_METHODS[path].name] += 1
        call: Any = channel.unary_unary(path)
        try:
            wire = await call(request, metadata=_passed_on(context), timeout=context.time_remaining())
        except aio.AioRpcError as error:
            return await _abort(context, error)
        for reply in proxy.replies(path, wire):
            match reply:
                case Ends(code, message, trailers):
                    await context.abort(_code(code), message, trailers)
                case Silence():
                    await asyncio.Event().wait()
                case _:
                    return _wire(reply)
        raise AssertionError("no reply")

    return forward


def _forward_stream(proxy: Tampered, channel: aio.Channel, path: str) -> Callable[[bytes, Any], Any]:
    async def forward(request: bytes, context: Any) -> AsyncIterator[bytes]:
        proxy.calls[_METHODS[path].name] += 1
        call: Any = channel.unary_stream(path)
        running = call(request, metadata=_passed_on(context), timeout=context.time_remaining())
        try:
            async for wire in running:
                for reply in proxy.replies(path, wire):
                    match reply:
                        case Ends(code, message, trailers):
                            await context.abort(_code(code), message, trailers)
                        case Silence():
                            await asyncio.Event().wait()
                        case _:
                            yield _wire(reply)
        except aio.AioRpcError as error:
            await _abort(context, error)
        finally:
            running.cancel()

    return forward


def _multiplex(proxy: Tampered, channel: aio.Channel) -> Callable[[object, Any], None]:
    async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        del context
        paths: dict[int, str] = {}
        silent: set[int] = set()

        async def asked() -> AsyncIterator[bytes]:
            async for wire in requests:
                for start in multiplex_pb2.MultiplexRequest.FromString(wire).starts:
                    paths[start.call] = start.method
                    proxy.calls[_METHODS[start.method].name] += 1
                yield wire

        stream: Any = channel.stream_stream(_MULTIPLEX)
        running = stream(asked())
        try:
            async for wire in running:
                response = multiplex_pb2.MultiplexResponse.FromString(wire)
                for answer in _changed(proxy, response, paths, silent):
                    if proxy.change_stream is not None:
                        proxy.change_stream(answer)
                    yield answer.SerializeToString()
        finally:
            running.cancel()

    def add(servicer: object, server: Any) -> None:
        del servicer
        handlers = {"Multiplex": grpc.stream_stream_rpc_method_handler(forward)}
        handler = grpc.method_handlers_generic_handler("baton.engine.v1.MultiplexService", handlers)
        server.add_generic_rpc_handlers([handler])

    return add


def _changed(
    proxy: Tampered, response: multiplex_pb2.MultiplexResponse, paths: dict[int, str], silent: set[int]
) -> Iterable[multiplex_pb2.MultiplexResponse]:
    """The replacement of a response of the shared stream. Tokens stay tokens, of which none is a message."""
    for call, token_id in zip(response.token_calls, response.token_ids, strict=True):
        message = decode_pb2.DecodeResponse(tokens=decode_pb2.DecodedTokens(token_ids=[token_id]))
        if call not in silent:
            yield from _answers(call, proxy.replies(paths[call], message.SerializeToString()), silent)
    for answer in response.answers:
        if answer.call in silent:
            continue
        if answer.HasField("status"):
            yield multiplex_pb2.MultiplexResponse(answers=[answer])
        else:
            yield from _answers(answer.call, proxy.replies(paths[answer.call], answer.message), silent)


def _answers(call: int, replies: Iterable[Reply], silent: set[int]) -> Iterable[multiplex_pb2.MultiplexResponse]:
    for reply in replies:
        match reply:
            case Silence():
                silent.add(call)
                return
            case Ends(code, message, trailers):
                silent.add(call)
                status = multiplex_pb2.CallStatus(code=code, message=message, trailers=to_messages(trailers))
                yield multiplex_pb2.MultiplexResponse(answers=[{"call": call, "status": status}])  # type: ignore[list-item]
                return
            case decode_pb2.DecodeResponse() if reply.WhichOneof("event") == "tokens" and not reply.tokens.logprobs:
                ids = reply.tokens.token_ids
                yield multiplex_pb2.MultiplexResponse(token_calls=[call] * len(ids), token_ids=ids)
            case _:
                yield multiplex_pb2.MultiplexResponse(answers=[{"call": call, "message": _wire(reply)}])  # type: ignore[list-item]


def _wire(reply: Any) -> bytes:
    return reply if isinstance(reply, bytes) else bytes(reply.SerializeToString())


def _passed_on(context: Any) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in context.invocation_metadata() if key.startswith(("x-baton", "traceparent"))]


def _code(number: int) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == number)


async def _abort(context: Any, error: aio.AioRpcError) -> Any:
    await context.abort(error.code(), error.details() or "", error.trailing_metadata() or ())
