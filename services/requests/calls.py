"""The calls that run on this worker: admitted once each, counted, and stopped by request id or by a drain."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

from baton.errors import BatonError, Cancelled, Draining, InvalidRequest, RequestExists
from baton.inference.v1 import timing_pb2
from engine_protocol.roles import Role, role_kinds
from rpc.status import OK, outcome_of
from rpc.tracing.span import current_span
from services.engines.running.request_context import set_traceparent, track_freed_kv
from services.identity import Identity
from services.requests.bounds import require_names
from services.requests.fault_injection import NO_FAULTS, FaultReader, Metadata
from services.sleeping.sleeper import Sleeper
from services.telemetry import metrics
from services.telemetry.timings import CallClock

# A worker that decodes also reads KV before a request's Decode, in a call of its own.
CallKind = str
_BEFORE_DECODES = ("prefetch", "warm")


class RunningCall:
    """One running call of a role. The code that runs it keeps `stage` up to date."""

    def __init__(self, stage: "timing_pb2.Stage.ValueType", sleeper: Sleeper | None = None) -> None:
        self.stage = stage
        self._sleeper = sleeper
        self.clock = CallClock()
        self.freed_kv = track_freed_kv()
        self.ended = asyncio.Event()
        self.stopped_by: BatonError | None = None
        self.faults = NO_FAULTS
        self._task = asyncio.current_task()

    def stop(self, error: BatonError) -> None:
        """Cancels the call, which then raises `error`. Once `ended` is set, its blocks are back."""
        if self.stopped_by is None and self._task is not None:
            self.stopped_by = error
            self._task.cancel()

    async def awake(self, *, has_kv: bool = False) -> None:
        """Waits, unless the call has KV there, until the engine has its memory, which it keeps until the call ends."""
        if self._sleeper is not None:
            await self._sleeper.enter(self, has_kv=has_kv)

    def end(self) -> None:
        """Notes that it runs no longer."""
        if self._sleeper is not None:
            self._sleeper.leave(self)
        self._task = None
        self.ended.set()


class Calls:
    """All running calls, by kind and request id."""

    def __init__(self, identity: Identity, faults: FaultReader, sleeper: Sleeper | None = None) -> None:
        self._identity = identity
        self._sleeper = sleeper
        self._faults = faults
        self._calls: dict[tuple[CallKind, str], RunningCall] = {}
        self.draining = False

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def run(
        self, kind: CallKind, request_id: str, model: str, metadata: Metadata = (), *, is_return: bool = False
    ) -> Iterator[RunningCall]:
        """Admits a request, and counts it as running while the context is open, within one task.

        One that comes back with KV of this worker is admitted by a draining worker, too.
        `metadata` is the call's, and may contain a fault plan. Raises RoleMismatch, ModelNotFound, Draining or
        RequestExists. Errors that pass through get the worker's id and the kind as their stage, unless they have them.
        """
        reason = BatonError.reason
        try:
            self._admit(kind, request_id, model, is_return)
            call = self._calls[kind, request_id] = RunningCall(first_stages()[kind], self._sleeper)
            set_traceparent(current_span().traceparent)
            try:
                call.faults = self._faults.read(metadata, _role(kind), request_id)
                yield call
                reason = OK
            except asyncio.CancelledError:
                _raise_if_stopped(call)
                raise
            finally:
                del self._calls[kind, request_id]
                call.end()
        except BatonError as error:
            error.stage = error.stage or kind
            error.worker_id = error.worker_id or self._identity.worker_id
            reason = error.reason
            raise
        except asyncio.CancelledError:
            reason = Cancelled.reason
            raise
        finally:
            metrics.CALLS.labels(kind, outcome_of(reason), reason).inc()

    def count(self, role: Role) -> int:
        """The running calls of a role."""
        return sum(_role(kind) == role for kind, _ in self._calls)

    def find(self, request_id: str) -> list[RunningCall]:
        """Returns the calls of a request, in the order of the stages."""
        return [call for kind in first_stages() if (call := self._calls.get((kind, request_id)))]

    async def stop_all(self, error: BatonError) -> None:
        """Stops all calls, and waits for their end."""
        calls = list(self._calls.values())
        for call in calls:
            call.stop(error)
        for call in calls:
            await call.ended.wait()

    def _admit(self, kind: CallKind, request_id: str, model: str, is_return: bool) -> None:
        self._identity.require_role(_role(kind))
        self._identity.require_model(model)
        if not request_id:
            raise InvalidRequest.of("request_id", "is empty")
        require_names(request_id=request_id)
        if self.draining and not is_return:
            raise Draining(f"worker {self._identity.worker_id} is draining")
        if (kind, request_id) in self._calls:
            raise RequestExists(f"request {request_id} is already in {kind} on worker {self._identity.worker_id}")


@cache
def first_stages() -> Mapping[CallKind, "timing_pb2.Stage.ValueType"]:
    """The stage that a call begins with, in the order of a request's calls."""
    stages = {kind.name: timing_pb2.Stage.Value(kind.stage) for kind in role_kinds().values()}
    return stages | dict.fromkeys(_BEFORE_DECODES, timing_pb2.STAGE_HANDOFF_WAIT)


def _role(kind: CallKind) -> Role:
    return "decode" if kind in _BEFORE_DECODES else kind


def aborted(request_id: str) -> Cancelled:
    """Returns the error of a call that was aborted by its request id."""
    return Cancelled(f"request {request_id} was aborted")


def _raise_if_stopped(call: RunningCall) -> None:
    if call.stopped_by is None:
        return
    # The cancellation is our own and becomes an error here, so that the task itself continues.
    task = asyncio.current_task()
    uncancel = getattr(task, "uncancel", None)
    if uncancel is not None:
        uncancel()
    raise call.stopped_by from None
