"""One request as it passes through the router: `RequestContext`, made once in the servicer and passed as `ctx`."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from baton.errors import DeadlineExceeded, PermissionDenied, RequestExists, RequestNotFound
from baton.inference.v1 import generate_pb2
from engine_protocol.fault_injection import FAULT_KEY, Fault, RouterPoint, parse
from router.config import LimitsConfig
from router.qos import Metadata, RequestQos, UnauthenticatedTenants
from router.recording.notes import AnswerNotes
from router.resume.handle import Handle, Keep, answer_call_id, keep_seconds
from router.telemetry.stats import RequestStats
from router.telemetry.timings import Timings
from router.workers.cancellation import Cancellation
from rpc.auth.caller import Caller, current_caller
from rpc.interceptors.calls import arrived_at, message_bytes
from rpc.metadata import ATTEMPT_KEY, REQUEST_KEY, remaining_seconds, was_left_at_its_deadline
from runtime.clock import monotonic
from runtime.entropy import token_hex

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
        texts = [str(value) for key, value in metadata or () if key == FAULT_KEY]
        text = texts[0] if texts else ""
        if not text:
            return _NO_FAULTS
        if not is_allowed:
            raise PermissionDenied(f"{FAULT_KEY} is not allowed here: allow_faults is off")
        return cls(text, tuple(fault for fault in parse(text) if fault.role == "router"))

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
    """When a request must end, counted from the creation of this object.

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
        return max(0.0, self._ends_at - monotonic())

    @property
    def has_ended_the_call(self) -> bool:
        """True if it is why the caller has just cancelled the call."""
        remaining = self.remaining_seconds
        return self.is_callers and was_left_at_its_deadline(remaining, self._seconds - remaining)

    def exceeded(self, stage: str, worker_id: str = "") -> DeadlineExceeded:
        """The error for a deadline that passed during this stage."""
        return DeadlineExceeded(f"the deadline passed during {stage}", stage=stage, worker_id=worker_id)


@dataclass(frozen=True, slots=True, eq=False)
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
    def timings(self) -> Timings:
        """Where the request's time goes."""
        return self.stats.timings

    @property
    def is_large(self) -> bool:
        """True if checking the request takes too long for the event loop. Token ids take less time than texts."""
        if self.message_bytes <= _LARGE_MESSAGE_BYTES:
            return False
        prompt = self.request.token_ids
        quick_bytes = prompt.ByteSize() if len(prompt.ids) <= _MANY_IDS else 0
        return self.message_bytes - quick_bytes > _LARGE_MESSAGE_BYTES

    def worker_metadata(self, attempt: int) -> tuple[tuple[str, str | bytes], ...]:
        """The metadata of the `attempt`th call to workers of one role: the fault plan, and the client's id for logs."""
        return (*self.faults.metadata(attempt), (REQUEST_KEY, self.request_id.encode("utf-8", "replace")))

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
    """Makes the context of each call. `proxies` are the callers that may name their tenants; `claimed` are the names
    that callers without authentication give themselves.

    `begin_notes` gives the notes of a call with this metadata.
    """

    limits: LimitsConfig
    allow_faults: bool = False
    proxies: frozenset[str] = frozenset()
    claimed: UnauthenticatedTenants = field(default_factory=UnauthenticatedTenants)
    begin_notes: Callable[[Metadata | None], AnswerNotes | None] = lambda _metadata: None

    def create(self, request: generate_pb2.GenerateRequest, call: Any) -> RequestContext:
        """Reads a call. Raises PermissionDenied or InvalidRequest for wrong metadata."""
        metadata, new = call.invocation_metadata(), _new_ids()
        request_id = request.request_id or new[32:]
        keep = None
        if request.response.HasField("keep"):
            keep = Keep(keep_seconds(request.response, self.limits.max_keep_seconds), Handle.new(new[:32]))
        return RequestContext(
            request=request,
            request_id=request_id,
            caller=current_caller(),
            message_bytes=message_bytes(),
            faults=FaultPlan.read(metadata, is_allowed=self.allow_faults),
            qos=self.read_qos(call),
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
        caller = current_caller()
        qos = RequestQos.read(call.invocation_metadata(), caller, self.proxies)
        is_own = caller is not None or self.claimed.has_account(qos.tenant)
        return qos if is_own else replace(qos, shares_account=True)


class RequestTable:
    """The running requests. Ids are unique among those of one caller."""

    def __init__(self) -> None:
        self._running: dict[tuple[Caller | None, str], RequestContext] = {}

    def __len__(self) -> int:
        return len(self._running)

    def enter(self, ctx: RequestContext) -> "_Listed":
        """Lists a request while the context is open. Raises RequestExists when it is entered.

        A request that goes on with answers takes the place of the one that it goes on with, which may still run.
        """
        return _Listed(self._running, ctx)

    def find(self, request_id: str, caller: Caller | None) -> Sequence[RequestContext]:
        """The caller's own request with this id; for operators, all with this id. Raises RequestNotFound.

        Without authentication every caller sees all requests.
        """
        if own := self._running.get((caller, request_id)):
            return [own]
        sees_all = caller is None or caller.role == "operator"
        found = [ctx for ctx in self._running.values() if ctx.request_id == request_id and sees_all]
        if not found:
            raise RequestNotFound(f"no request {request_id!r} runs here")
        return found


def _new_ids() -> str:
    """Two ids that cannot be guessed, of 32 hexadecimal digits each; asking the system twice takes twice as long."""
    return token_hex(32)


class _Listed:
    """The entry of a request, while `RequestTable.enter` is open."""

    __slots__ = ("_ctx", "_key", "_running")

    def __init__(self, running: dict[tuple[Caller | None, str], RequestContext], ctx: RequestContext) -> None:
        self._running = running
        self._ctx = ctx
        self._key = (ctx.caller, ctx.request_id)

    def __enter__(self) -> None:
        replaces = self._ctx.keep is not None and self._ctx.keep.is_resumed
        if self._key in self._running and not replaces:
            raise RequestExists(f"a request {self._ctx.request_id!r} is running")
        self._running[self._key] = self._ctx

    def __exit__(self, *exception: object) -> None:
        if self._running.get(self._key) is self._ctx:
            del self._running[self._key]
        self._ctx.cancellation.close()
