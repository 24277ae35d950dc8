"""The trace viewer's memory and speed with 10,000 traces: `python -m benchmarks.telemetry.trace_sink`.

Sends traces of 12 spans with Baton's attributes over OTLP/gRPC to `baton traces` in another process, and prints that
process's memory, how fast it received them, and how long searches take.
"""

import asyncio
import random
import sys
import time
import urllib.request
from collections.abc import Sequence

import psutil
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from cli.local.ports import free_port
from rpc.channels import open_channel

TRACES = 10_000
SPANS = 12
TRACES_A_CALL = 40
SERVICES = ("baton-router", "baton-prefill", "baton-decode")


def attribute(key: str, value: str | int | float) -> KeyValue:
    kind = {str: "string_value", int: "int_value", float: "double_value"}[type(value)]
    return KeyValue(key=key, value=AnyValue(**{kind: value}))


def span(trace_id: bytes, parent: bytes, number: int) -> Span:
    started = time.time_ns()
    attributes: list[tuple[str, str | int | float]] = [
        ("rpc.system.name", "grpc"),
        ("rpc.method", "baton.engine.v1.DecodeService/Decode"),
        ("rpc.response.status_code", "OK"),
        ("baton.request_id", trace_id.hex()),
        ("baton.handoff.transport", "shm"),
        ("baton.handoff.bytes", random.getrandbits(24)),
        ("baton.handoff.transfer_seconds", random.random()),
        ("baton.completion_tokens", random.getrandbits(8)),
    ]
    return Span(
        trace_id=trace_id,
        span_id=random.randbytes(8),
        parent_span_id=parent,
        name=f"stage {number}",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=started,
        end_time_unix_nano=started + random.getrandbits(28),
        attributes=[attribute(key, value) for key, value in attributes],
    )


def trace() -> list[Span]:
    trace_id = random.randbytes(16)
    root = span(trace_id, b"", 0)
    return [root, *(span(trace_id, root.span_id, number) for number in range(1, SPANS))]


def request(traces: Sequence[list[Span]]) -> trace_service_pb2.ExportTraceServiceRequest:
    groups = []
    for index, service in enumerate(SERVICES):
        resource = Resource(attributes=[attribute("service.name", service), attribute("service.instance.id", service)])
        spans = [each for spans in traces for each in spans[index :: len(SERVICES)]]
        groups.append(ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=spans)]))
    return trace_service_pb2.ExportTraceServiceRequest(resource_spans=groups)


def search_seconds(url: str) -> float:
    started = time.perf_counter()
    with urllib.request.urlopen(url) as answer:
        answer.read()
    return time.perf_counter() - started


async def main() -> None:
    otlp, listen = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "cli", "traces", "--otlp", otlp, "--listen", listen, "--max-traces", "10000"]
    viewer = await asyncio.create_subprocess_exec(*command)
    process = psutil.Process(viewer.pid)
    try:
        async with open_channel(otlp) as channel:
            await asyncio.wait_for(channel.channel_ready(), 20)
            empty = process.memory_info().rss
            stub = trace_service_pb2_grpc.TraceServiceStub(channel)
            requests = [request([trace() for _ in range(TRACES_A_CALL)]) for _ in range(TRACES // TRACES_A_CALL)]
            started = time.perf_counter()
            for each in requests:
                await stub.Export(each)
            seconds = time.perf_counter() - started
        full = process.memory_info().rss
        api = f"http://{listen}/api/traces?limit=20"
        first = await asyncio.to_thread(search_seconds, f"{api}&service=baton-decode")
        none = await asyncio.to_thread(search_seconds, f"{api}&tag=no.such:value")
        print(f"{TRACES} traces of {SPANS} spans, {requests[0].ByteSize() // TRACES_A_CALL // SPANS} bytes a span")
        print(f"RSS {empty / 2**20:.0f} MiB empty, {full / 2**20:.0f} MiB full")
        print(f"taken at {TRACES * SPANS / seconds:,.0f} spans/s")
        print(f"a search: {first * 1e3:.0f} ms for the newest 20, {none * 1e3:.0f} ms where nothing matches")
        print(f"after the searches RSS {process.memory_info().rss / 2**20:.0f} MiB")
    finally:
        viewer.terminate()
        await viewer.wait()


if __name__ == "__main__":
    asyncio.run(main())
