"""Recording spans: what they keep, which request they belong to, and what comes too late."""

from opentelemetry.trace import SpanKind
from support.recorded_spans import recorded

from baton.errors import NoWorker


async def test_what_is_said_of_a_span_after_its_end_is_dropped() -> None:
    async with recorded() as (tracer, found):
        span = tracer.begin("work", None)
        span.set({"early": 1})
        span.end()
        span.set({"late": 2})
        span.event("late")
        span.link(span.context, "late")
        span.fail(NoWorker("late"))
        span.end()
    (ended,) = found.spans
    assert (dict(ended.attributes), ended.events, ended.links) == ({"early": 1}, (), ())
    assert ended.status.is_unset


async def test_a_span_takes_as_long_as_was_measured() -> None:
    async with recorded() as (tracer, found):
        span = tracer.begin("work", None)
        span.stage("stage", 10.0, 12.5, {"n": 3})
        span.end()
    stage = found.named("stage")
    assert stage.end_time - stage.start_time == 2_500_000_000
    assert stage.parent.span_id == found.named("work").context.span_id
    assert stage.kind is SpanKind.INTERNAL


async def test_each_trace_and_each_span_has_an_id_of_its_own() -> None:
    async with recorded() as (tracer, found):
        for _ in range(100):
            tracer.begin("work", None).end()
    assert len({span.context.trace_id for span in found.spans}) == 100
    assert len({span.context.span_id for span in found.spans}) == 100


async def test_about_the_configured_share_of_traces_that_begin_here_is_recorded() -> None:
    async with recorded(sample_ratio=0.3) as (tracer, found):
        for _ in range(2000):
            tracer.begin("work", None).end()
    # Six standard deviations.
    assert 477 < len(found.spans) < 723
