"""A call of a role to one worker after another, until one has answered it."""

from typing import Protocol, TypeVar

from opentelemetry.trace import SpanKind

from baton.errors import BatonError, NoWorker, Overloaded
from discovery.registry import WorkerRecord
from engine_protocol.roles import Role
from router.context import RequestContext
from router.routing.retry import Attempts, Retries
from router.workers.calls import RETRYABLE, annotate_worker_errors, answer_of
from router.workers.handle import WorkerHandle
from router.workers.replies import Suspects
from router.workers.spans import worker_attributes
from router.workers.watching.waiting_calls import Waiting
from rpc.tracing.span import stage_span

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
Metadata = tuple[tuple[str, str | bytes], ...]


class RoleCall(Protocol[Result_co]):
    """A call that any worker of `role` can answer, and the tokens that it lets one compute."""

    @property
    def role(self) -> Role: ...

    @property
    def tokens(self) -> int: ...

    def place(self, tried: frozenset[str]) -> WorkerHandle:
        """The best worker now, but for the processes that were tried. Raises NoWorker."""

    def begin(self, worker: WorkerHandle) -> str:
        """Notes the worker that gets the call next. Returns the id that the worker is to know the call by."""

    async def run(self, worker: WorkerHandle, seconds: float, metadata: Metadata) -> Result_co:
        """Makes the call, unary or streaming, and checks the reply. Raises BatonError; an InvalidReply is retried."""

    def waits(self, waiting: Waiting) -> None:
        """Is given what tells how long `run` waits: a stream that gets on sets `asked_at` to None."""
        del waiting

    async def relieve(self, worker: WorkerHandle) -> bool:
        """True if an overloaded worker can take the call now, since something was freed there."""
        del worker
        return False


async def call_with_retries(ctx: RequestContext, retries: Retries, call: RoleCall[Result]) -> Result:
    """Calls the best worker, or others if it fails. Raises NoWorker, or the error of the last attempt."""
    attempts, suspects = retries.attempts(call.role), Suspects()
    failure: BatonError | None = None
    while True:
        worker = _place(call, attempts.tried, failure)
        try:
            found = await _attempt(ctx, retries, call, worker, attempts)
            suspects.answered(worker)
            return found
        except RETRYABLE as error:
            suspects.add(worker, call.role, error)
            attempts.allow(error)
            failure = error
        if isinstance(failure, Overloaded) and await call.relieve(worker):
            continue
        attempts.exclude(worker.record.process)
        # Raises the failure at once where no other worker is left.
        _place(call, attempts.tried, failure)
        await attempts.pause(failure, ctx.deadline.remaining_seconds)


def _place(call: RoleCall[Result], tried: frozenset[str], failure: BatonError | None) -> WorkerHandle:
    try:
        return call.place(tried)
    except NoWorker:
        if failure is None:
            raise
        raise failure from None


async def _attempt(
    ctx: RequestContext, retries: Retries, call: RoleCall[Result], worker: WorkerHandle, attempts: Attempts
) -> Result:
    call_id = call.begin(worker)
    metadata = ctx.worker_metadata(attempts.number)
    with (
        annotate_worker_errors(call.role, worker, ctx),
        stage_span(call.role, worker_attributes(worker), kind=SpanKind.CLIENT),
        worker.track_load(call.tokens),
    ):
        waiting = _RoleWaiting(ctx, retries, call, attempts)
        call.waits(waiting)
        running = call.run(worker, ctx.deadline.remaining_seconds, metadata)
        return await answer_of(running, worker, call_id, waiting)


class _RoleWaiting(Waiting):
    """A call of a role, while it waits for a worker."""

    def __init__(self, ctx: RequestContext, retries: Retries, call: RoleCall[object], attempts: Attempts) -> None:
        self._ctx = ctx
        self._retries = retries
        self._call = call
        self._attempts = attempts
        self.awaits_answer, self.tokens = True, call.tokens

    def answer_seconds(self) -> float:
        return self._retries.answer_seconds(self._ctx.deadline.remaining_seconds)

    def another_can(self, worker: WorkerRecord) -> bool:
        if not self._attempts.has_another:
            return False
        try:
            self._call.place(self._attempts.tried | {worker.process})
        except NoWorker:
            return False
        return True
