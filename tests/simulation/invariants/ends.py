"""Every call ends, in time, with the right status; what was cancelled stops; what expires is explained."""

from collections.abc import Callable
from functools import partial
from typing import Any

from simulation.channel import NO_STATUS
from simulation.entropy import Time
from simulation.invariants.base import Invariant, engine_of, running_at
from simulation.steps import router_call

# Beyond its deadline: the way of the status, hiccups, and a second try of a client that lost its connection.
_LATE_SECONDS = 3.0
# Until a cancellation has reached every worker: a round trip, a held loop, a look.
_STOP_SECONDS = 1.5
# How long faults have effects after their end: reconnecting, deadlines of unary calls, marks, registry leases.
_AFTER_SECONDS = 30.0
# What a peer's kernel tells of, and how long a request may be nowhere then.
_TOLD = {"kill", "drain", "leave", "reset", "reset_all"}
_NOWHERE_SECONDS = 4.0
_FEW = 2  # answers in a batch, beside which those of another worker wait longer than their router does
_FREED_SECONDS = 1.0  # after a lease has expired
_TRY_SECONDS = 1.0  # a shorter deadline leaves no time for a twin
# Kinds of faults of one process, of which a twin hears nothing.
_OF_ONE = {
    *("kill", "vanish", "pause", "drain", "leave", "reset", "half", "slow", "lost_lease", "expire"),
    *("kill_keeper", "pause_keeper", "upgrade", "refuse"),
}
_NEVER = {
    "UNKNOWN",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "UNIMPLEMENTED",
    "FAILED_PRECONDITION",
    "DATA_LOSS",
    "OUT_OF_RANGE",
}

# Nor may these end a call between processes.
_WRONG = {"UNKNOWN", "INTERNAL", "INVALID_ARGUMENT", "DATA_LOSS", "OUT_OF_RANGE"}


class EveryCallEnds(Invariant):
    """No call outlives its deadline by much, at its client and at workers, whatever was lost; a client always gets an
    end, from its server if nothing disturbs.
    """

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._due: list[tuple[float, Any]] = []

    def look(self) -> None:
        late = [result for due, result in self._due if due <= Time.now]
        if late:
            self._due = [one for one in self._due if one[0] > Time.now]
            for result in late:
                self._look_at_workers(result)

    def _look_at_workers(self, result: Any) -> None:
        ids = self.world.steps.ids.get(f"r{result.index}", set())
        for name, worker in self.workers():
            # One that stood still has to catch up.
            if self.world.chaos.disturbed(Time.now, {name}, _LATE_SECONDS):
                continue
            calls = [kind for kind, call_id in running_at(worker) if call_id in ids]
            if calls:
                self.problem(f"{result.name}: {', '.join(calls)} goes on at {name} after its deadline")

    def ended(self, result: Any) -> None:
        seconds = result.ended - result.started
        if seconds > result.asked.timeout * result.tries + _LATE_SECONDS + result.tries:
            self.problem(f"{result.name}: took {seconds:.2f} s of {result.asked.timeout:g}")
        if not result.code:
            self.problem(f"{result.name}: has no end")
        if not result.asked.keep:
            deadline = result.started + result.asked.timeout + result.tries
            self._due.append((max(Time.now, deadline) + _LATE_SECONDS, result))
        is_disturbed = self.world.chaos.disturbed(result.started, None, _AFTER_SECONDS)
        if result.message == NO_STATUS and not (is_disturbed or result.asked.window):
            self.problem(f"{result.name}: its server has never ended it")


class StatusesAreRight(Invariant):
    """A status says what happened: an answer that nothing disturbed is whole, and an error has its cause. No process of
    the fleet finds what another one sends wrong.
    """

    def logged(self, name: str, method: str, event: dict[str, Any], error: Any) -> None:
        if event.get("event") == "call ended" and event.get("code") in _WRONG:
            self.problem(f"at {name}: a call has ended with {event['code']}, and nobody sends what is wrong: {event}")

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
        fleet = world.plan.fleet
        has_room, has_time = fleet.max_running == 0 and fleet.max_batch > _FEW, result.asked.timeout >= _TRY_SECONDS
        if world.plan.profile == "one_fault" and has_room and has_time:
            # Each worker has a twin with room for its answers: only what touches a router, or goes on in it, is felt.
            names = set(world.plan.fleet.router_names)
            kinds = {fault.kind for fault in world.plan.faults}
            if kinds <= _OF_ONE:
                return bool(world.chaos.disturbed(result.started, names, _AFTER_SECONDS))
        return bool(world.chaos.disturbed(result.started, None, _AFTER_SECONDS))


class CancelledWorkStops(Invariant):
    """A request that its client has left, or whose router has ended, runs nowhere and holds nothing a moment later."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._due: list[tuple[float, Callable[[], None]]] = []

    def ended(self, result: Any) -> None:
        if result.code in ("LEFT", "CANCELLED", "DEADLINE_EXCEEDED") and not result.asked.keep:
            self._later(partial(self._check, Time.now, result))

    def killed(self, node: Any) -> None:
        steps = self.world.steps
        ids = {call_id for call_id, router in steps.routers.items() if router is node} - steps.kept
        if ids:
            self._later(partial(self._check_orphans, Time.now, node.name, ids))

    def look(self) -> None:
        due = [one for one in self._due if one[0] <= Time.now]
        if due:
            self._due = [one for one in self._due if one[0] > Time.now]
            for _, check in due:
                check()

    def _later(self, check: Callable[[], None]) -> None:
        self._due.append((Time.now + _STOP_SECONDS + self.world.plan.hiccup_seconds * 4, check))

    def _check(self, ended: float, result: Any) -> None:
        ids = self.world.steps.ids.get(f"r{result.index}", set())
        routers = set(self.world.plan.fleet.router_names)
        for name, worker in self.workers():
            # A worker that was cut off, or whose router was lost, learns of it by its leases and keepalive.
            if self.world.chaos.disturbed(result.started, {name, *routers}, _AFTER_SECONDS):
                continue
            calls = [kind for kind, call_id in running_at(worker) if call_id in ids]
            if calls:
                self.problem(f"{result.name}: {', '.join(calls)} goes on at {name} {Time.now - ended:.2f} s later")
            kv = worker.leases.held if engine_of(worker) is not None else []  # embeddings are of several requests
            if any(router_call(lease.request_id) in ids for lease in kv):
                self.problem(f"{result.name}: {name} holds its KV {Time.now - ended:.2f} s later")
        for name, router in self.routers():
            left = [key for key, ctx in router.requests._running.items() if ctx.call_id in ids]
            if left and not self.world.chaos.disturbed(result.started, None, _AFTER_SECONDS):
                self.problem(f"{result.name}: runs on at {name} {Time.now - ended:.2f} s later")

    def _check_orphans(self, killed: float, router: str, ids: set[str]) -> None:
        for name, worker in self.workers():
            if self._is_cut_off(name, router, killed):
                continue
            calls = [kind for kind, call_id in running_at(worker) if call_id in ids]
            if calls:
                self.problem(f"{', '.join(calls)} goes on at {name} {Time.now - killed:.2f} s after {router} has ended")

    def _is_cut_off(self, name: str, router: str, killed: float) -> bool:
        """True if the worker need not have learned of the router's end, by another fault than that."""
        return any(
            one.fault.kind not in ("kill", "drain", "leave")
            and (one.ended is None or one.ended + _AFTER_SECONDS >= killed)
            and one.touches({name, router})
            for one in self.world.chaos.happened
        )


class RequestsAreSomewhere(Invariant):
    """A request that runs at a router runs at a worker, or waits there for a place: who was reset or has ended is
    noticed at once, and not only when an answer is overdue.
    """

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._since: dict[str, float] = {}

    def look(self) -> None:
        at_workers = self._at_workers()
        waits = any(queue.waiting for _, router in self.routers() for queue in router.path.admission._queues.values())
        running = self.world.running if self._can_run() else {}
        self._since = {name: since for name, since in self._since.items() if name in running}
        for name, client in running.items():
            asked, ids = client.result.asked, self.world.steps.ids.get(name)
            if waits or asked.image or asked.window or not ids or not ids.isdisjoint(at_workers):
                self._since.pop(name, None)
            elif Time.now - self._since.setdefault(name, Time.now) > _NOWHERE_SECONDS:
                self._since[name] = Time.now
                if not self._is_hidden():
                    self.problem(f"{client.result.name}: runs at no worker for {_NOWHERE_SECONDS:g} s")

    def _can_run(self) -> bool:
        """True if a router and a worker of each role are there, and after a fault another one that decodes: until then
        requests wait at their router, which sends none back to the process that has failed it.
        """
        if not any(True for _ in self.routers()):
            return False
        roles = [name.partition("-")[0] for name, _ in self.workers()]
        decoders = roles.count("decode") + roles.count("mixed")
        return bool(decoders > bool(self.world.chaos.happened) and ("mixed" in roles or "prefill" in roles))

    def _at_workers(self) -> set[str]:
        return {
            call_id
            for name in self.world.plan.fleet.workers
            if name in self.world.hosts
            for _, call_id in running_at(self.world.hosts[name])
        }

    def _is_hidden(self) -> bool:
        """True if something has happened of which nobody is told."""
        return any(
            one.fault.kind not in _TOLD and (one.ended is None or one.ended + _AFTER_SECONDS >= Time.now)
            for one in self.world.chaos.happened
        )


class ExpiredLeasesAreExplained(Invariant):
    """A lease is the backstop: one expires only where a fault, or a loop that was held, kept its release away, or
    where a kept decode has yielded after its reader had left: until then its next router could go on with the KV.
    """

    def logged(self, name: str, method: str, event: dict[str, Any], error: Any) -> None:
        if event.get("event") != "handoff lease expired" or self._is_untold(name, event.get("call_id")):
            return
        if self.world.is_quiet and not self.world.plan.faults:
            self.problem(f"at {name}, in quiet: {event}")
            return
        since = Time.now - self.world.plan.fleet.lease_seconds - 2.0
        if not self.world.chaos.disturbed(since, None, _AFTER_SECONDS if self.world.plan.faults else 0.0):
            self.problem(f"at {name}: {event.get('call_id')}, {event.get('blocks')} blocks, and no fault explains it")

    def _is_untold(self, name: str, call_id: Any) -> bool:
        """True if a lease is of the KV of a kept decode, of whose end no router has been told yet."""
        streams = self.world.hosts[name].kept.streams if name in self.world.hosts else []
        return any(one.kept.request_id == call_id and one.has_yielded and not one.is_told for one in streams)


class ExpiredLeasesAreFreed(Invariant):
    """Blocks of a lease that has expired are free a moment later, whatever else is held and renewed there."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._since: dict[tuple[str, str], float] = {}

    def look(self) -> None:
        before, self._since = self._since, {}
        for name, worker in self.workers():
            for handoff_id, lease in worker.leases._leases.items():
                if lease.expires_at <= Time.now:
                    self._note(name, handoff_id, lease, before)

    def _note(self, name: str, handoff_id: str, lease: Any, before: dict[tuple[str, str], float]) -> None:
        since = self._since[name, handoff_id] = before.get((name, handoff_id), Time.now)
        if Time.now - since > _FREED_SECONDS + 4 * self.world.plan.hiccup_seconds:
            self._since[name, handoff_id] = Time.now
            late = Time.now - lease.expires_at
            self.problem(f"{name}: holds {len(lease.held.block_ids)} blocks {late:.2f} s after their lease has expired")
