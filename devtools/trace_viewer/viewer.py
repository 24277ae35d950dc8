"""The whole viewer: OTLP in, Jaeger's API and the page out, over one store."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from devtools.trace_viewer.api import TraceApi
from devtools.trace_viewer.http import serve_http
from devtools.trace_viewer.store import Bounds, TraceStore
from rpc.health import Health
from rpc.server import Service, serve

SERVICE_NAME: str = trace_service_pb2.DESCRIPTOR.services_by_name["TraceService"].full_name


class TraceSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Stores the spans that exporters send."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, _context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._store.add(request.resource_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@dataclass(frozen=True, slots=True)
class Viewer:
    """A viewer that listens: for exporters at `otlp_address`, for browsers at `http_address`."""

    otlp_address: str
    http_address: str
    store: TraceStore

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{self.http_address}"


@asynccontextmanager
async def open_viewer(otlp_listen: str, http_listen: str, bounds: Bounds) -> AsyncGenerator[Viewer, None]:
    """A viewer while the context is open. Raises ConfigError if it cannot listen."""
    store, health = TraceStore(bounds), Health()
    add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    async with AsyncExitStack() as stack:
        services = [Service(SERVICE_NAME, add, TraceSink(store))]
        server = await stack.enter_async_context(serve(otlp_listen, services, health=health, drain_seconds=1.0))
        port = await stack.enter_async_context(serve_http(http_listen, TraceApi(store).answer))
        health.set("", True)
        yield Viewer(server.address, f"{http_listen.rpartition(':')[0]}:{port}", store)
