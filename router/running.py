"""The requests that run, of all kinds: listed, traced, measured, and ended by their deadline or their client."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from baton.errors import Cancelled
from router.context import RequestContext, RequestTable
from router.telemetry.request_metrics import RequestMetrics, record_request
from rpc.tracing.span import Span, stage_span


class RunningRequests:
    """The running requests of a router, in `table`. `record` takes those with notes that have ended."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self.metrics = metrics
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
        with (
            stage_span(name) as span,
            self.table.enter(ctx),
            _NOT_RECORDED if ctx.notes is None else _Recorded(ctx, self.record),
            record_request(ctx.stats, ctx.call_id, self.metrics),
        ):
            ctx.timings.is_traced = span.is_recording
            describe(span)
            try:
                await ctx.cancellation.run(answer(), ctx.deadline.remaining_seconds)
            except TimeoutError:
                raise ctx.deadline.exceeded(ctx.timings.stage_name) from None
            except (asyncio.CancelledError, Cancelled):
                _record_passed_deadline(ctx, span)
                raise
            finally:
                ended()


_NOT_RECORDED: AbstractContextManager[None] = nullcontext()


class _Recorded:
    """Records a request when the context ends, once its outcome is known."""

    def __init__(self, ctx: RequestContext, record: Callable[[RequestContext, BaseException | None], None]) -> None:
        self._ctx = ctx
        self._record = record

    def __enter__(self) -> None:
        """No-op: notes are taken on the way."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._record(self._ctx, error)


def _record_passed_deadline(ctx: RequestContext, span: Span) -> None:
    """Records a cancellation as DEADLINE_EXCEEDED if gRPC made it because the client's deadline passed."""
    if ctx.deadline.has_ended_the_call and not ctx.cancellation.reason:
        error = ctx.deadline.exceeded(ctx.timings.stage_name)
        ctx.stats.outcome = error.reason
        span.fail(error)
