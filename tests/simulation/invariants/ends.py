"""Every call ends, in time, with the right status; what was cancelled stops; what expires is explained."""

from typing import Any

from router.context import RequestTable
from simulation.entropy import Time
from simulation.invariants.base import Invariant, calls_of

# Beyond its deadline: the way of the status, hiccups, and a second try of a client that lost its connection.
_LATE_SECONDS = 3.0
# Until a cancellation has reached every worker: a round trip, a held loop, a look.
_STOP_SECONDS = 1.5
# How long faults have effects after their end: reconnecting, deadlines of unary calls, marks, registry leases.
_AFTER_SECONDS = 30.0
_NEVER = {
    "UNKNOWN",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "UNIMPLEMENTED",
    "FAILED_PRECONDITION",
    "DATA_LOSS",
    "OUT_OF_RANGE",
}


class EveryCallEnds(Invariant):
    """No call outlives its deadline by much, and a client always gets an end."""

    def ended(self, result: Any) -> None:
        seconds = result.ended - result.started
        if seconds > result.asked.timeout * result.tries + _LATE_SECONDS + result.tries:
            self.problem(f"{result.name}: took {seconds:.2f} s of {result.asked.timeout:g}")
        if not result.code:
            self.problem(f"{result.name}: has no end")


class StatusesAreRight(Invariant):
    """A status says what happened: an answer that nothing disturbed is whole, and an error has its cause."""

    def ended(self, result: Any) -> None:
        asked, code = result.asked, result.code
        if code in _NEVER:
            self.problem(f"{result.name}: no client may get this")
            return
        right = {"OK"} | ({"LEFT"} if result.left else set())
        if result.cancelled_at is not None:
            right |= {"CANCELLED"}
        if asked.timeout < 30 or asked.window:
            right |= {"DEADLINE_EXCEEDED"}
        if asked.drops or asked.step_act == "drop":
            right |= {"LOST"}  # before it has got the handle to resume by
        if not self.world.is_quiet:
            right |= {"RESOURCE_EXHAUSTED"}
            if self._disturbed(result):
                right |= {"UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "NOT_FOUND", "LOST", "ALREADY_EXISTS"}
        if code not in right:
            self.problem(f"{result.name}, of {', '.join(result.workers) or 'no worker'}: nothing explains it")

    def _disturbed(self, result: Any) -> bool:
        """True if a fault went on that this answer could not be spared."""
        world = self.world
        names = None
        if world.plan.profile == "one_fault" and world.plan.fleet.max_running == 0:
            # Each worker has a twin: only what touches a router, or goes on in it, is felt.
            names = set(world.plan.fleet.router_names)
            kinds = {fault.kind for fault in world.plan.faults}
            if kinds <= {"kill", "vanish", "pause", "drain", "reset", "half", "slow", "lost_lease"}:
                return bool(world.chaos.disturbed(result.started, names, _AFTER_SECONDS))
        return bool(world.chaos.disturbed(result.started, None, _AFTER_SECONDS))


class CancelledWorkStops(Invariant):
    """A request that its client has left runs nowhere, and holds nothing, a moment later."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._ids: dict[str, set[str]] = {}  # the ids on workers of each request
        self._due: list[tuple[float, float, Any]] = []

    def install(self) -> None:
        enter, ids = RequestTable.enter, self._ids

        def noting(table: RequestTable, ctx: Any) -> Any:
            ids.setdefault(ctx.request_id, set()).add(ctx.call_id)
            return enter(table, ctx)

        RequestTable.enter = noting  # type: ignore[method-assign]

    def ended(self, result: Any) -> None:
        stops = result.code in ("LEFT", "CANCELLED", "DEADLINE_EXCEEDED") and not result.asked.keep
        if stops:
            held = self.world.plan.hiccup_seconds * 4
            self._due.append((Time.now + _STOP_SECONDS + held, Time.now, result))

    def look(self) -> None:
        due = [one for one in self._due if one[0] <= Time.now]
        if due:
            self._due = [one for one in self._due if one[0] > Time.now]
            for _, ended, result in due:
                self._check(ended, result)

    def _check(self, ended: float, result: Any) -> None:
        ids = self._ids.get(f"r{result.index}", set())
        for name, worker in self.workers():
            # A worker that was cut off, or whose router was lost, learns of it by its leases and keepalive.
            if self.world.chaos.disturbed(result.started, None, _AFTER_SECONDS):
                continue
            calls = [kind for kind, call_id in calls_of(worker)._calls if call_id in ids]
            if calls:
                self.problem(f"{result.name}: {', '.join(calls)} goes on at {name} {Time.now - ended:.2f} s later")
            if any(lease.request_id in ids for lease in worker.leases.held):
                self.problem(f"{result.name}: {name} holds its KV {Time.now - ended:.2f} s later")
        for name, router in self.routers():
            left = [key for key, ctx in router.requests._running.items() if ctx.call_id in ids]
            if left and not self.world.chaos.disturbed(result.started, None, _AFTER_SECONDS):
                self.problem(f"{result.name}: runs on at {name} {Time.now - ended:.2f} s later")


class ExpiredLeasesAreExplained(Invariant):
    """A lease is the backstop: one expires only where a fault, or a loop that was held, kept its release away."""

    def logged(self, name: str, method: str, event: dict[str, Any], error: Any) -> None:
        if event.get("event") != "handoff lease expired" or (self.world.is_quiet and not self.world.plan.faults):
            if event.get("event") == "handoff lease expired":
                self.problem(f"at {name}, in quiet: {event}")
            return
        since = Time.now - self.world.plan.fleet.lease_seconds - 2.0
        if not self.world.chaos.disturbed(since, None, _AFTER_SECONDS if self.world.plan.faults else 0.0):
            self.problem(f"at {name}: {event.get('call_id')}, {event.get('blocks')} blocks, and no fault explains it")
