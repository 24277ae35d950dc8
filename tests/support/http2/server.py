"""A small server on our own HTTP/2, with a method for each thing that a test asks of a call."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop
from grpc import StatusCode, aio

from baton.connection.settings import MAX_RECEIVE_BYTES
from baton_http2.limits import Http2Limits, ServerLimits
from baton_http2.server.server import Http2Server
from rpc.auth.tls import TlsConfig
from rpc.interceptors.errors import answer_errors
from rpc.interceptors.reading import Reader, ReadLimits
from rpc.interceptors.wrap import WrapMethods

SERVICE = "test.Echo"
Context = aio.ServicerContext


@dataclass(slots=True)
class Seen:
    """The methods' view of their calls."""

    started: int = 0
    cancelled: int = 0
    contexts: list[Any] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Echoing:
    """A running server."""

    address: str
    port: int
    server: Http2Server
    seen: Seen


def path(method: str) -> str:
    """The method as `:path` has it."""
    return f"/{SERVICE}/{method}"


def _number(request: bytes) -> int:
    return int(request) if request.isdigit() and len(request) <= 8 else 0


async def unary(request: bytes, context: Context) -> bytes:
    return request


async def count(request: bytes, context: Context) -> AsyncIterator[bytes]:
    """Messages, as many as the request says, of their numbers."""
    for number in range(_number(request)):
        yield str(number).encode()


async def large(request: bytes, context: Context) -> bytes:
    return bytes(_number(request))


async def gather(requests: AsyncIterator[bytes], context: Context) -> bytes:
    return b",".join([request async for request in requests])


async def bidi(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def metadata(request: bytes, context: Context) -> bytes:
    """Sends what came back: as initial metadata, and as trailing metadata with `-bin`."""
    sent = context.invocation_metadata()
    await context.send_initial_metadata([(key, value) for key, value in sent if key.startswith("initial")])
    context.set_trailing_metadata([(key, value) for key, value in sent if key.startswith("trailing")])
    return repr([(key, value) for key, value in sent if key.startswith("x-")]).encode()


async def abort(request: bytes, context: Context) -> bytes:
    await context.abort(StatusCode.DATA_LOSS, "lost: 100% of é", [("why", "asked"), ("why-bin", b"\x00\xff")])
    raise AssertionError


async def abort_late(request: bytes, context: Context) -> None:
    await context.write(b"first")
    await context.abort(StatusCode.ABORTED, "second")


async def set_code(request: bytes, context: Context) -> bytes:
    context.set_code(StatusCode.NOT_FOUND)
    context.set_details("it is not there")
    return b"not sent"


async def fail(request: bytes, context: Context) -> bytes:
    raise ZeroDivisionError("a secret")


async def illegal_trailers(request: bytes, context: Context) -> bytes:
    context.set_trailing_metadata([("bad key", "x")])
    return b""


async def no_answer(request: bytes, context: Context) -> bytes:
    return None  # type: ignore[return-value]


async def cancel_itself(request: bytes, context: Context) -> bytes:
    raise asyncio.CancelledError


async def facts(request: bytes, context: Context) -> bytes:
    remaining = context.time_remaining()
    return repr((context.peer(), remaining is not None and 0 < remaining <= 30)).encode()


async def identity(request: bytes, context: Context) -> bytes:
    """Of a certificate."""
    return repr((context.auth_context().get("peer_uri"), context.peer_identities())).encode()


async def compressed(request: bytes, context: Context) -> bytes:
    context.set_compression(grpc.Compression.Gzip)
    return request


async def endless(request: bytes, context: Context) -> None:
    while True:
        await context.write(request)


async def ticks(request: bytes, context: Context) -> None:
    """A message every 10 ms, as a model's tokens come; each says when it was written."""
    while True:
        await context.write(str(time.monotonic()).encode())
        await asyncio.sleep(0.01)


def hang(seen: Seen) -> Callable[..., Any]:
    async def hang_on(request: bytes, context: Context) -> None:
        seen.started += 1
        seen.contexts.append(context)
        context.add_done_callback(seen.ended.append)
        try:
            if request:
                await context.write(request)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.cancelled += 1
            raise

    return hang_on


def handlers(seen: Seen) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
    unaries = (unary, large, metadata, abort, set_code, fail, illegal_trailers, no_answer, cancel_itself)
    unaries = (*unaries, facts, identity, compressed)
    streams = {"count": count, "abort_late": abort_late, "endless": endless, "ticks": ticks, "hang": hang(seen)}
    return {
        **{each.__name__: grpc.unary_unary_rpc_method_handler(each) for each in unaries},
        **{name: grpc.unary_stream_rpc_method_handler(each) for name, each in streams.items()},
        "gather": grpc.stream_unary_rpc_method_handler(gather),
        "bidi": grpc.stream_stream_rpc_method_handler(bidi),
    }


@asynccontextmanager
async def echoing(
    limits: Http2Limits | None = None,
    tls: TlsConfig | None = None,
    *,
    wrappers: Sequence[Any] = (answer_errors,),
    grace_seconds: float | None = None,
    **more: Any,
) -> AsyncGenerator[Echoing, None]:
    """Serves until the context is left. `more` are ServerLimits."""
    with ThreadPoolExecutor(1) as threads:
        reader = Reader(ReadLimits(MAX_RECEIVE_BYTES, 65536), threads)
        interceptors = [WrapMethods(wrappers, reader)] if wrappers else []
        async with _served(interceptors, ServerLimits(limits or Http2Limits(), **more), tls, grace_seconds) as served:
            yield served


@asynccontextmanager
async def _served(
    interceptors: Sequence[WrapMethods], limits: ServerLimits, tls: TlsConfig | None, grace_seconds: float | None
) -> AsyncGenerator[Echoing, None]:
    seen = Seen()
    server = Http2Server(interceptors, limits)
    server.add_registered_method_handlers(SERVICE, handlers(seen))
    port = server.bind("127.0.0.1:0", tls.server_context() if tls else None)
    await server.start()
    try:
        yield Echoing(f"127.0.0.1:{port}", port, server, seen)
    finally:
        await server.stop(grace_seconds)


def main() -> None:
    """A server in a process of its own: prints its port, and serves until it is killed."""

    async def serve() -> None:
        async with echoing() as server:
            print(server.port, flush=True)
            await asyncio.Event().wait()

    uvloop.run(serve())


if __name__ == "__main__":
    main()
