"""Records the spans of a test with a real tracer, in memory, until it is closed."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rpc.tracing.exporter import TracingConfig
from rpc.tracing.tracer import Tracer, recording


@dataclass
class Recorded:
    """The spans that were exported when its tracer was closed."""

    spans: Sequence[ReadableSpan] = field(default_factory=tuple)

    def named(self, name: str) -> ReadableSpan:
        """The only span whose name ends so."""
        (span,) = [span for span in self.spans if span.name.endswith(name)]
        return span


@asynccontextmanager
async def recorded(**settings: object) -> AsyncIterator[tuple[Tracer, Recorded]]:
    """A tracer, and what it has recorded, once the context is left."""
    exporter = InMemorySpanExporter()
    found = Recorded()
    config = TracingConfig(export_interval_seconds=0.05, **settings)  # type: ignore[arg-type]
    async with recording(config, exporter, Resource({"service.name": "test"})) as tracer:
        yield tracer, found
    found.spans = exporter.get_finished_spans()
