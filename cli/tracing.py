"""The spans of `baton generate`: each trace begins with the command's own span."""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from cli.local.state import StateFolder

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# A receiver that does not respond must not delay the command's exit.
_EXPORT_SECONDS = 1.0


@asynccontextmanager
async def client_spans(router: str) -> "AsyncGenerator[TracerProvider | None, None]":
    """A provider whose spans are exported when the context exits; None if no receiver is configured.

    They go to OpenTelemetry's usual environment variables, else to the viewer of the local cluster, if `router` is the
    address of one of its routers or of its Envoy.
    """
    is_configured = any(os.environ.get(name) for name in _VARIABLES)
    endpoint = "" if is_configured else _viewer_of(router)
    if not is_configured and not endpoint:
        yield None
        return
    provider = _provider(endpoint)
    try:
        yield provider
    finally:
        await asyncio.to_thread(_shut_down, provider)


def _viewer_of(router: str) -> str:
    """The OTLP address of this folder's cluster; empty if `router` is not part of it."""
    state = StateFolder().read()
    if state is None:
        return ""
    if router not in (each.address for each in state.processes if each.role in ("router", "envoy")):
        return ""
    return next((each.otlp for each in state.processes if each.role == "traces"), "")


def _provider(endpoint: str) -> "TracerProvider":
    """`endpoint` is `host:port`; if it is empty, the environment decides."""
    # Slow to import, and most commands do not need them.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from rpc.tracing.exporter import silence_library_logs

    silence_library_logs()
    local = {"endpoint": f"http://{endpoint}", "insecure": True} if endpoint else {}
    exporter = OTLPSpanExporter(timeout=_EXPORT_SECONDS, **local)  # type: ignore[arg-type]
    resource = Resource.create({"service.name": "baton-cli", "service.namespace": "baton"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _shut_down(provider: "TracerProvider") -> None:
    # The processor itself would wait for up to 30 s.
    flushing = threading.Thread(target=provider.shutdown, name="trace-flush", daemon=True)
    flushing.start()
    flushing.join(_EXPORT_SECONDS)
