"""The cost of propagating a trace: `python -m benchmarks.telemetry.trace_propagation`.

Compares a plain channel, TracedChannel inside and outside a span, and gRPC's own client interceptors, which are the
alternative: microseconds of CPU of this process for a unary call, and for a message of a stream.
Client and server share the process, so only differences are meaningful.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from grpc import aio
from opentelemetry.trace import SpanContext, TraceFlags

from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import inference_service_pb2_grpc as inference
from rpc.channels import TracedChannel
from rpc.tracing.span import NO_SPAN, Span, current_span, entered

CALLS = 200
MESSAGES = 2_000
ROUNDS = 30


class Servicer(inference.InferenceServiceServicer):
    """Answers at once."""

    async def CancelGeneration(self, request: Any, context: Any) -> pb.CancelGenerationResponse:
        return pb.CancelGenerationResponse()

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        for _ in range(MESSAGES):
            await context.write(pb.GenerateResponse())


class InjectUnary(aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(_with_trace(details), request)


class InjectStream(aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(_with_trace(details), request)


def _with_trace(details: Any) -> Any:
    metadata = aio.Metadata(*(details.metadata or ()), *current_span().metadata)
    return details._replace(metadata=metadata)


async def unary_microseconds(channel: aio.Channel) -> float:
    stub = inference.InferenceServiceStub(channel)
    started = time.process_time()
    for _ in range(CALLS):
        await stub.CancelGeneration(pb.CancelGenerationRequest())
    return (time.process_time() - started) / CALLS * 1e6


async def message_microseconds(channel: aio.Channel) -> float:
    stub = inference.InferenceServiceStub(channel)
    started = time.process_time()
    async for _ in stub.Generate(pb.GenerateRequest()):
        pass
    return (time.process_time() - started) / MESSAGES * 1e6


async def main() -> None:
    server = aio.server()
    inference.add_InferenceServiceServicer_to_server(Servicer(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    span = Span(SpanContext(1 << 100, 1 << 50, is_remote=False, trace_flags=TraceFlags(1)))
    kinds: dict[str, tuple[Callable[[], aio.Channel], Span]] = {
        "bare channel": (lambda: aio.insecure_channel(address), NO_SPAN),
        "TracedChannel, no span": (lambda: TracedChannel(aio.insecure_channel(address)), NO_SPAN),
        "TracedChannel, in a span": (lambda: TracedChannel(aio.insecure_channel(address)), span),
        "interceptors, in a span": (
            lambda: aio.insecure_channel(address, interceptors=[InjectUnary(), InjectStream()]),
            span,
        ),
    }
    best = {name: [float("inf"), float("inf")] for name in kinds}
    for _ in range(ROUNDS):
        for name, (open_channel, current) in kinds.items():
            async with open_channel() as channel:
                with entered(current):
                    best[name][0] = min(best[name][0], await unary_microseconds(channel))
                    best[name][1] = min(best[name][1], await message_microseconds(channel))
    for name, (call, message) in best.items():
        print(f"{name:<26} {call:8.1f} us a unary call   {message:6.2f} us a message of a stream")
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
