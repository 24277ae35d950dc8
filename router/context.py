"""One request as it passes through the router: `RequestContext`, made once in the servicer and passed as `ctx`.

The requests that run, of all kinds: listed, traced, measured, and ended by their deadline or their client.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from hmac import compare_digest
from typing import Any

import structlog

from baton.errors import Cancelled, DeadlineExceeded, PermissionDenied, RequestExists, RequestNotFound
from baton.inference.v1 import generate_pb2
from engine_protocol.fault_injection import FAULT_KEY, Fault, RouterPoint, parse
from router.config import LimitsConfig
from router.qos import UNNAMED, Metadata, RequestQos, UnauthenticatedTenants
from router.recording.notes import AnswerNotes
from router.resume.handle import Handle, Keep, answer_call_id, keep_seconds
from router.telemetry import request_metrics
from router.telemetry.spans import set_result_attributes
from router.telemetry.stats import RequestStats
from router.telemetry.timings import Timings
from router.workers.cancellation import Cancellation
from rpc.auth.caller import Caller, current_caller
from rpc.interceptors.calls import arrived_at, message_bytes
from rpc.metadata import ATTEMPT_KEY, REQUEST_KEY, remaining_seconds, was_left_at_its_deadline
from rpc.tracing.span import Span, current_span, stage_span
from runtime.clock import monotonic
from runtime.entropy import token_hex
from runtime.telemetry.logs import add_log_fields

log = structlog.get_logger(__name__)

_LARGE_MESSAGE_BYTES = 4096  # checking a larger request on the event loop would delay other streams
_MANY_IDS = 4096  # so many are checked in a quarter of a millisecond; going to a thread and back takes as long


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults that a request asks for (docs/faults.md). The router injects its own and passes the text on."""

    text: str = ""
    faults: tuple[Fault, ...] = ()  # the router's own

    @classmethod
    def read(cls, metadata: Metadata | None, *, is_allowed: bool) -> "FaultPlan":
        """Reads the metadata of a call. Raises PermissionDenied if plans are off, InvalidRequest for a wrong plan."""
        for key, value in metadata or ():
            if key == FAULT_KEY and value:
                break
        else:
            return _NO_FAULTS
        if not is_allowed:
            raise PermissionDenied(f"{FAULT_KEY} is not allowed here: allow_faults is off")
        return cls(str(value), tuple(fault for fault in parse(str(value)) if fault.role == "router"))

    def metadata(self, attempt: int) -> tuple[tuple[str, str], ...]:
        """The metadata for the `attempt`th call of a request to workers of one role."""
        return ((FAULT_KEY, self.text), (ATTEMPT_KEY, str(attempt))) if self.text else ()

    async def inject(self, point: RouterPoint, request_id: str) -> None:
        """Injects the faults that are planned for this point."""
        for fault in self.faults:
            if fault.point == point and fault.applies_to(request_id):
                log.warning("injected a fault", action=fault.action, point=point)
                await (asyncio.sleep(fault.seconds) if fault.action == "delay" else asyncio.Event().wait())


_NO_FAULTS = FaultPlan()


class Deadline:
    """The time by which a request must end, counted from the creation of this object.

    `is_callers` is false for the router's default, which the caller does not know.
    """

    def __init__(self, seconds: float, *, is_callers: bool = True) -> None:
        self.is_callers = is_callers
        self._seconds = seconds
        self._ends_at = monotonic() + seconds

    @classmethod
    def of(cls, client_seconds: float | None, limits: LimitsConfig) -> "Deadline":
        """The client's, within the configured limits."""
        if client_seconds is None:
            return cls(limits.request_timeout_seconds, is_callers=False)
        longest = limits.max_timeout_seconds
        return cls(min(client_seconds, longest), is_callers=client_seconds <= longest)

    @property
    def remaining_seconds(self) -> float:
        """The timeout for the next call."""
        seconds = self._ends_at - monotonic()
        return seconds if seconds > 0 else 0.0

    @property
    def has_ended_the_call(self) -> bool:
        """True if it is why the caller has just cancelled the call."""
        remaining = self.remaining_seconds
        return self.is_callers and was_left_at_its_deadline(remaining, self._seconds - remaining)

    def exceeded(self, stage: str, worker_id: str = "") -> DeadlineExceeded:
        """The error for a deadline that passed during this stage."""
        return DeadlineExceeded(f"the deadline passed during {stage}", stage=stage, worker_id=worker_id)


@dataclass(slots=True, eq=False)  # not frozen: freezing takes a call for each of its many fields
class RequestContext:
    """A request, from its arrival to its end. Clients know it by `request_id`, workers by `call_id`.

    The call id is this router's own: other clients, here or on another router, may use the same request id.
    """

    request: generate_pb2.GenerateRequest
    request_id: str
    caller: Caller | None
    message_bytes: int
    qos: RequestQos
    deadline: Deadline
    stats: RequestStats
    faults: FaultPlan
    cancellation: Cancellation
    keep: Keep | None = None  # of a request whose answers go on without its client, or that goes on with answers
    answer: int = 0  # which of the request's answers this is the context of
    notes: AnswerNotes | None = None  # of a request that may be recorded

    @property
    def call_id(self) -> str:
        """The id that workers know the request by."""
        return self.cancellation.call_id

    @property
    def prompt_call_id(self) -> str:
        """The id of a prompt's calls before the decode: of a kept answer this router's own; see Cancellation.own_id."""
        return self.call_id if self.keep is None else self.cancellation.own_id

    @property
    def is_large(self) -> bool:
        """True if checking the request takes too long for the event loop. Token ids take less time than texts."""
        if self.message_bytes <= _LARGE_MESSAGE_BYTES:
            return False
        prompt = self.request.token_ids
        quick_bytes = prompt.ByteSize() if len(prompt.ids) <= _MANY_IDS else 0
        return self.message_bytes - quick_bytes > _LARGE_MESSAGE_BYTES

    def worker_metadata(self, attempt: int) -> tuple[tuple[str, str | bytes], ...]:
        """The metadata of the `attempt`th call to workers of one role.

        The client's id for logs, its tenant and priority, and the fault plan.
        """
        named = (REQUEST_KEY, self.request_id.encode("utf-8", "replace"))
        if self.qos is UNNAMED and self.faults is _NO_FAULTS:
            return (named,)
        return (named, *self.qos.metadata(), *self.faults.metadata(attempt))

    def part(self, answer: int | None = None) -> "RequestContext":
        """The context of a part of the request that workers know by a call id of its own. Raises Cancelled.

        That of another answer follows from the request's own, so that another router finds it.
        """
        call_id = _new_ids()[:32] if answer is None else answer_call_id(self.call_id, answer)
        stats = RequestStats(self.request_id, Timings(), model=self.stats.model, prompt_tokens=self.stats.prompt_tokens)
        notes = self.notes.part() if self.notes is not None and answer is not None else None
        cancellation = self.cancellation.part(call_id)
        return replace(self, stats=stats, cancellation=cancellation, answer=answer or 0, notes=notes)

    async def inject(self, point: RouterPoint) -> None:
        """Injects the faults that the request plans for this point."""
        if self.faults.faults:
            await self.faults.inject(point, self.request_id)


@dataclass(frozen=True, slots=True)
class ContextFactory:
    """Makes the context of each call. `proxies` are the callers that may name their tenants; `unauthenticated` are the
    names that callers without authentication give themselves.

    `begin_notes` gives the notes of a call with this metadata.
    """

    limits: LimitsConfig
    allow_faults: bool = False
    proxies: frozenset[str] = frozenset()
    unauthenticated: UnauthenticatedTenants = field(default_factory=UnauthenticatedTenants)
    begin_notes: Callable[[Metadata | None], AnswerNotes | None] = lambda _metadata: None

    def create(self, request: generate_pb2.GenerateRequest, call: Any) -> RequestContext:
        """Reads a call. Raises PermissionDenied or InvalidRequest for wrong metadata."""
        metadata, caller, new = call.invocation_metadata(), current_caller(), _new_ids()
        request_id = request.request_id or new[32:]
        keep = None
        if request.response.HasField("keep"):
            keep = Keep(keep_seconds(request.response, self.limits.max_keep_seconds), Handle.new(new[:32]))
        return RequestContext(
            request=request,
            request_id=request_id,
            caller=caller,
            message_bytes=message_bytes(),
            faults=FaultPlan.read(metadata, is_allowed=self.allow_faults),
            qos=self._qos(metadata, caller),
            deadline=Deadline.of(remaining_seconds(call), self.limits),
            stats=RequestStats(request_id, Timings(arrived_at())),
            cancellation=Cancellation(new[:32]),
            keep=keep,
            notes=self.begin_notes(metadata),
        )

    def read_faults(self, call: Any) -> FaultPlan:
        """The faults that a call plans. Raises PermissionDenied."""
        return FaultPlan.read(call.invocation_metadata(), is_allowed=self.allow_faults)

    def read_qos(self, call: Any) -> RequestQos:
        """The tenant and priority of a call. Raises InvalidRequest."""
        return self._qos(call.invocation_metadata(), current_caller())

    def read_asker(self, call: Any) -> Caller | None:
        """The caller under the name of its tenant, by which its requests are its own. Raises InvalidRequest."""
        caller = current_caller()
        return None if caller is None else replace(caller, name=self.read_qos(call).tenant)

    def _qos(self, metadata: Metadata | None, caller: Caller | None) -> RequestQos:
        qos = RequestQos.read(metadata, caller, self.proxies)
        is_own = caller is not None or self.unauthenticated.has_account(qos.tenant)
        return qos if is_own else replace(qos, shares_account=True)


class RequestTable:
    """The running requests. Ids are unique among those of one tenant, and among all without authentication."""

    def __init__(self) -> None:
        self._running: dict[tuple[str | None, str], RequestContext] = {}
        self._kept: dict[str, RequestContext] = {}  # those with a handle, by its call id

    def __len__(self) -> int:
        return len(self._running)

    def add(self, ctx: RequestContext) -> None:
        """Lists a request. Raises RequestExists.

        A request that goes on with answers takes the place of the one that it goes on with, which may still run.
        """
        key = _key(ctx)
        if key in self._running and not (ctx.keep is not None and ctx.keep.is_resumed):
            raise RequestExists(f"a request {ctx.request_id!r} is running")
        self._running[key] = ctx
        if ctx.keep is not None:
            self._kept[ctx.keep.handle.call_id] = ctx

    def remove(self, ctx: RequestContext) -> None:
        """Notes that nothing of a request runs here any more."""
        key = _key(ctx)
        if self._running.get(key) is ctx:
            del self._running[key]
        if ctx.keep is not None and self._kept.get(ctx.keep.handle.call_id) is ctx:
            del self._kept[ctx.keep.handle.call_id]
        ctx.cancellation.close()

    def find_kept(self, handle: Handle) -> RequestContext | None:
        """The request that has this handle, if it runs here. Its owner is for the caller to check."""
        ctx = self._kept.get(handle.call_id)
        if ctx is None or ctx.keep is None or not compare_digest(ctx.keep.handle.secret, handle.secret):
            return None
        return ctx

    def find(self, request_id: str, caller: Caller | None) -> Sequence[RequestContext]:
        """The request with this id of the tenant that the caller is named after; for operators, all with this id.

        Without authentication every caller sees all requests. Raises RequestNotFound.
        """
        if own := self._running.get((caller.name if caller else None, request_id)):
            return [own]
        sees_all = caller is None or caller.role == "operator"
        found = [ctx for ctx in self._running.values() if ctx.request_id == request_id and sees_all]
        if not found:
            raise RequestNotFound(f"no request {request_id!r} runs here")
        return found


def _key(ctx: RequestContext) -> tuple[str | None, str]:
    # Not the caller: a tenant may have several credentials, and a proxy several tenants.
    return ctx.qos.tenant if ctx.caller else None, ctx.request_id


def _new_ids() -> str:
    """Two ids that cannot be guessed, of 32 hexadecimal digits each; asking the system twice takes twice as long."""
    return token_hex(32)


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
