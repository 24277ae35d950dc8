"""The requests that run on this worker now: to be refused twice, aborted by name, counted, and drained."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from baton.inference.v1 import timing_pb2

from rpc.errors import BatonError, Cancelled, Draining, InvalidRequest, RequestExists
from rpc.outcomes import OK, outcome_of
from rpc.tracing.span import current_span
from services import metrics
from services.clock import CallClock
from services.faults import NO_FAULTS, FaultReader, Metadata
from services.footprint import begin_footprint
from services.identity import Identity, Role
from services.request_trace import note_traceparent


class Call:
    """One running call of a role. `stage` is kept up to date by whoever runs it."""

    def __init__(self, stage: "timing_pb2.Stage.ValueType") -> None:
        self.stage = stage
        self.clock = CallClock()
        self.footprint = begin_footprint()
        self.ended = asyncio.Event()
        self.stopped_by: BatonError | None = None
        self.faults = NO_FAULTS
        self._task = asyncio.current_task()

    def stop(self, error: BatonError) -> None:
        """Cancels the call, which then raises `error`. Wait for `ended`: its blocks are back then."""
        if self.stopped_by is None and self._task is not None:
            self.stopped_by = error
            self._task.cancel()


class Calls:
    """All running calls, by role and request id."""

    def __init__(self, identity: Identity, faults: FaultReader) -> None:
        self._identity = identity
        self._faults = faults
        self._calls: dict[tuple[Role, str], Call] = {}
        self.draining = False

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def run(self, role: Role, request_id: str, model: str, metadata: Metadata = ()) -> Iterator[Call]:
        """Admits a request and counts it as running while the context is open, within one task.

        `metadata` is the call's, which may ask for faults. Raises RoleMismatch, ModelNotFound, Draining or
        RequestExists. An error that passes through gets the worker's id and the role as its stage, where they are not
        known.
        """
        reason = BatonError.reason
        try:
            self._admit(role, request_id, model)
            call = self._calls[role, request_id] = Call(_FIRST_STAGES[role])
            note_traceparent(current_span().traceparent)
            try:
                call.faults = self._faults.read(metadata, role, request_id)
                yield call
                reason = OK
            except asyncio.CancelledError:
                _raise_if_stopped(call)
                raise
            finally:
                del self._calls[role, request_id]
                call.ended.set()
        except BatonError as error:
            error.stage = error.stage or role
            error.worker_id = error.worker_id or self._identity.worker_id
            reason = error.reason
            raise
        except asyncio.CancelledError:
            reason = Cancelled.reason
            raise
        finally:
            metrics.CALLS.labels(role, outcome_of(reason), reason).inc()

    def find(self, request_id: str) -> list[Call]:
        """The calls of a request, in the order of its life."""
        return [call for role in _FIRST_STAGES if (call := self._calls.get((role, request_id)))]

    async def stop_all(self, error: BatonError) -> None:
        """Stops what runs, and waits for its end."""
        calls = list(self._calls.values())
        for call in calls:
            call.stop(error)
        for call in calls:
            await call.ended.wait()

    def _admit(self, role: Role, request_id: str, model: str) -> None:
        self._identity.require_role(role)
        self._identity.require_model(model)
        if not request_id:
            raise InvalidRequest.of("request_id", "is empty")
        if self.draining:
            raise Draining(f"worker {self._identity.worker_id} is draining")
        if (role, request_id) in self._calls:
            raise RequestExists(f"request {request_id} is in {role} on worker {self._identity.worker_id} already")


_FIRST_STAGES: dict[Role, "timing_pb2.Stage.ValueType"] = {
    "encode": timing_pb2.STAGE_ENCODE,
    "prefill": timing_pb2.STAGE_PREFILL_COMPUTE,
    "decode": timing_pb2.STAGE_DECODE,
}


def aborted(request_id: str) -> Cancelled:
    """What a call raises that was stopped by name."""
    return Cancelled(f"request {request_id} was aborted")


def _raise_if_stopped(call: Call) -> None:
    if call.stopped_by is None:
        return
    # Our own cancel, and answered as an error from here on: the task itself is to go on.
    task = asyncio.current_task()
    uncancel = getattr(task, "uncancel", None)
    if uncancel is not None:
        uncancel()
    raise call.stopped_by from None
