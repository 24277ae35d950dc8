"""OTLP's messages: the same as the library's own, for everything that our spans have."""

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from support.recorded_spans import recorded

from baton.errors import NoWorker
from rpc.tracing.exporter import export_request

_CALLER = SpanContext(2**127 + 1, 2**63 + 1, True, TraceFlags(1), TraceState([("other", "1"), ("baton", "x")]))


async def test_spans_are_encoded_as_the_library_does() -> None:
    async with recorded() as (tracer, found):
        span = tracer.begin("served", _CALLER)
        span.set({"text": "é", "yes": True, "count": -5, "ratio": 0.5, "names": ["a", "b"], "nothing": ""})
        span.event("noted", {"why": "so"}, at=12.5)
        span.link(_CALLER, "prefill")
        child = span.child("called", kind=SpanKind.CLIENT)
        child.fail(NoWorker("none is there"))
        child.end()
        span.end()
        tracer.begin("alone", None, SpanKind.INTERNAL).end()
    assert len(found.spans) == 3
    assert export_request(found.spans) == encode_spans(found.spans)


async def test_an_attribute_that_has_no_encoding_costs_no_other_one() -> None:
    async with recorded() as (tracer, found):
        span = tracer.begin("work", None)
        span.set({"half": "\ud800", "large": 2**64, "next": "kept"})
        span.end()
    assert attributes(found.spans[0]) == {"half": "", "large": "", "next": "kept"}


def attributes(span: ReadableSpan) -> dict[str, str]:
    """The spans that a receiver has."""
    (message,) = export_request([span]).resource_spans[0].scope_spans[0].spans
    return {each.key: each.value.string_value for each in message.attributes}
