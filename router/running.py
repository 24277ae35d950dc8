"""The requests that run, of all kinds: listed, traced, measured, and ended by their deadline or their client."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from baton.errors import Cancelled
from router.context import RequestContext, RequestTable
from router.telemetry import request_metrics
from router.telemetry.spans import set_result_attributes
from rpc.tracing.span import Span, current_span, stage_span
from runtime.telemetry.logs import add_log_fields


class RunningRequests:
    """The running requests of a router, in `table`. `record` takes those with notes that have ended."""

    def __init__(self) -> None:
        self.table = RequestTable()
        self.record: Callable[[RequestContext, BaseException | None], None] = lambda _ctx, _error: None

    async def run(
        self,
        ctx: RequestContext,
        name: str,
        describe: Callable[[Span], None],
        answer: Callable[[], Coroutine[Any, Any, None]],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs `answer` in a span of this name, then `ended`. Raises a BatonError if it fails.

        A cancellation of the caller means that the client has left.
        """
        timings = ctx.stats.timings
        with stage_span(name) as span, _Running(self, ctx):
            timings.is_traced = span.is_recording
            if span.is_recording:
                describe(span)
            try:
                await ctx.cancellation.run(answer(), ctx.deadline.remaining_seconds)
            except TimeoutError:
                raise ctx.deadline.exceeded(timings.stage_name) from None
            except (asyncio.CancelledError, Cancelled):
                _record_passed_deadline(ctx, span)
                raise
            finally:
                ended()


class _Running:
    """A request while the context is open: listed, measured, and recorded once its outcome is known.

    At the end it fills the request's span and the log line of its call.
    """

    __slots__ = ("_ctx", "_requests")

    def __init__(self, requests: RunningRequests, ctx: RequestContext) -> None:
        self._requests = requests
        self._ctx = ctx

    def __enter__(self) -> None:
        ctx = self._ctx
        self._requests.table.add(ctx)
        add_log_fields(request_id=ctx.request_id, call_id=ctx.cancellation.call_id)
        request_metrics.began()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ctx, stats = self._ctx, self._ctx.stats
        try:
            stats.record_end(error)
            request_metrics.ended(stats)
            if stats.timings.is_traced:
                set_result_attributes(stats, current_span())
            add_log_fields(**stats.log_fields())
            if ctx.notes is not None:
                self._requests.record(ctx, error)
        finally:
            self._requests.table.remove(ctx)


def _record_passed_deadline(ctx: RequestContext, span: Span) -> None:
    """Records a cancellation as DEADLINE_EXCEEDED if gRPC made it because the client's deadline passed."""
    if ctx.deadline.has_ended_the_call and not ctx.cancellation.reason:
        error = ctx.deadline.exceeded(ctx.stats.timings.stage_name)
        ctx.stats.outcome = error.reason
        span.fail(error)
