"""The receiving end of OTLP/gRPC."""

from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from devtools.trace_viewer.store import TraceStore

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
