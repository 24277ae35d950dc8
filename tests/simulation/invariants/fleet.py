"""The fleet as a whole: it recovers by itself, keeps its limits, and logs no exception that no fault explains."""

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from discovery.record import WorkerRecord
from router.admission.quota_state import QuotaNeed, TenantQuota
from router.admission.quota_waits import QuotaWaits
from router.workers.members import Members
from simulation.entropy import Time
from simulation.invariants.base import Invariant, engine_of, running_at
from simulation.plan import TENANTS

_PROBE_SECONDS = 3.0
# A router that has become the home of a model's places lends none for so long.
_SETTLING_SECONDS = 1.5
BURST_SECONDS = 2.0
# So many looks are left out. A router asks a registry again after a loss, and removes nobody for the length of a lease;
# a view may be some times as late as usual, and keepalive finds out that a connection is half-open.
_LOOKS = 5
_VIEW_SECONDS, _LATE_VIEWS, _CUT_OFF_SECONDS = 5.0, 15, 30.0
# The requests to each router in quiet, and their tokens.
PROBES, PROBE_TOKENS = 3, 5
_AFTER_SECONDS = 30.0
_IDLE_SECONDS = 2.0  # until those who share memory have seen who wants it


class Recovers(Invariant):
    """Once faults are over every process is registered and ready for every router, and answers soon: marks expire,
    no worker is a zombie, and no router serves from a stale view.
    """

    def ended(self, result: Any) -> None:
        seconds = result.ended - result.started
        if result.asked.tenant == "probe":
            if result.code != "OK":
                self.problem(f"{result.name}: a request in quiet has failed")
            elif seconds > _PROBE_SECONDS + 4 * self.world.registry.late_seconds + self._seconds_in_turn():
                self.problem(f"{result.name}: a request in quiet took {seconds:.2f} s")

    def _seconds_in_turn(self) -> float:
        """The seconds that requests of the quiet time may wait for one another where places are few."""
        fleet = self.world.plan.fleet
        if not fleet.max_running:
            return 0.0
        decoders = sum(name.startswith(("decode", "mixed")) for name in self.world.workers)
        steps = PROBES * fleet.routers * PROBE_TOKENS / (fleet.max_running * decoders)
        return _SETTLING_SECONDS + steps * fleet.step_seconds

    def end(self) -> None:
        unready = self.world.unready()
        if unready:
            self.problem(f"not ready in quiet: {', '.join(unready[:3])}")
        missing = set(self.world.workers) - self.world.registry.registered().keys()
        if missing:
            self.problem(f"not registered in quiet: {', '.join(sorted(missing))}")
        for name, router in self.routers():
            for worker in router.cluster.workers:
                current = self.world.hosts.get(worker.record.worker_id)
                if current is not None and worker.record.epoch != current.epoch:
                    self.problem(
                        f"{name}: has epoch {worker.record.epoch} of {worker.record.worker_id}, not {current.epoch}"
                    )
                if self.world.is_up(worker.record.worker_id) and worker.record.draining:
                    self.problem(f"{name}: takes {worker.record.worker_id} for draining")

    def crashed(self, node: Any, error: Exception, text: str) -> None:
        if not self.world.chaos.disturbed(Time.now, None, _AFTER_SECONDS):
            self.problem(f"{node.name} ended with {error!r}\n{text}")
        else:
            # A process that could not start while the registry was away is started again, as by its supervisor.
            self.world.loop.call_later(1.0, self._start_again, node)

    def _start_again(self, node: Any) -> None:
        is_wanted = node.name not in self.world.absent and not self.world.stopping[node.name].is_set()
        if self.world.nodes.get(node.name) is node and is_wanted:
            self.world.kill(node.name, silently=False)
            self.world.start(node.name)


class ViewsAreFresh(Invariant):
    """A router watches the workers of the view that it has just got, and no others, and has those that are registered
    as soon as it can have learned of them.
    """

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._looks = 0
        self._since: dict[tuple[str, int, str, int], float] = {}

    def install(self) -> None:
        update = Members.update

        def updating(members: Members, records: Sequence[WorkerRecord]) -> None:
            update(members, records)
            differ = {one.process for one in records} ^ {one.process for one in members.records}
            if differ:
                names = ", ".join(sorted(map(str, differ)))
                self.problem(f"{self.world.loop.current.name}: watches other workers than its view has: {names}")

        Members.update = updating  # type: ignore[method-assign]

    def look(self) -> None:
        self._looks += 1
        if self._looks % _LOOKS:
            return
        before, self._since = self._since, {}
        registered = self.world.registry.registered()
        for name, router in self.routers():
            known = {(record.worker_id, record.epoch) for record in router.cluster._members.records}
            for worker, epoch in sorted(known ^ set(registered.items())):
                self._note(name, worker, epoch, before, is_known=(worker, epoch) in known)

    def _note(self, name: str, worker: str, epoch: int, before: Any, *, is_known: bool) -> None:
        key = (name, self.world.nodes[name].generation, worker, epoch)
        since = self._since[key] = before.get(key, Time.now)
        seconds = _VIEW_SECONDS + _LATE_VIEWS * self.world.registry.late_seconds + 4 * self.world.plan.hiccup_seconds
        if Time.now - since <= seconds:
            return
        self._since[key] = Time.now
        if not self.world.chaos.disturbed(since, {name}, _CUT_OFF_SECONDS):
            text = "still has" if is_known else "does not know"
            self.problem(f"{name}: {text} {worker} of epoch {epoch}, {Time.now - since:.1f} s after the registry")


class QuotasHold(Invariant):
    """All routers together admit no more of a tenant's requests than its rate and its burst allow.

    A request is admitted when its wait for the quota is over, which may be long after it came.
    """

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._admitted: dict[str, list[float]] = {}

    def install(self) -> None:
        use, admitted = QuotaWaits.use, self._admitted

        async def using(waits: QuotaWaits, tenant: TenantQuota, need: QuotaNeed, within_seconds: float) -> None:
            await use(waits, tenant, need, within_seconds)
            if need.requests and tenant.name in TENANTS:
                admitted.setdefault(tenant.name, []).append(Time.now)

        QuotaWaits.use = using  # type: ignore[method-assign]

    def end(self) -> None:
        if self.world.plan.faults or not self.world.plan.fleet.has_quotas:
            return
        rate, routers = self.world.plan.fleet.requests_per_second, self.world.plan.fleet.routers
        for tenant, times in self._admitted.items():
            times.sort()
            for first in range(len(times)):
                for last in range(first, len(times)):
                    seconds = times[last] - times[first]
                    if last - first + 1 > rate * (BURST_SECONDS + seconds) + routers:
                        self.problem(f"{tenant} had {last - first + 1} requests in {seconds:.2f} s")
                        return


class LimitsHold(Invariant):
    """No more requests run at a time than the limit of all routers for all decode workers.

    Kept answers are left out: they go on without their router, which gives their places to others.
    """

    def look(self) -> None:
        fleet = self.world.plan.fleet
        if not fleet.max_running or self.world.plan.faults:
            return
        running: Counter[str] = Counter()
        for _, worker in self.workers():
            engine = engine_of(worker)
            if engine is not None:
                running["decode"] += sum(
                    kind == "decode" and call_id not in self.world.steps.kept for kind, call_id in running_at(worker)
                )
        limit = fleet.max_running * (fleet.decode + fleet.mixed)
        if running["decode"] > limit + fleet.routers:
            self.problem(f"{running['decode']} decodes run, and the limit is {limit}")


class MemoryIsShared(Invariant):
    """One of the workers that share memory has it at a time, and no request waits for memory that is not used."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._idle_since = 0.0

    def begin(self) -> None:
        self._idle_since = Time.now

    def look(self) -> None:
        if not self.world.plan.fleet.shares_memory:
            return
        names = self.world.group.names
        awake = [name for name in names if not engine_of(self.world.hosts[name])._is_asleep]
        if len(awake) > 1:
            self.problem(f"{' and '.join(awake)} have memory of which there is enough for one")
        sleepers = [self.world.hosts[name].engines.sleeper for name in names]
        waits = any(one._waiters for one in sleepers)
        if not waits or any(one._users or one._is_held() for one in sleepers):
            self._idle_since = Time.now
        elif Time.now - self._idle_since > _IDLE_SECONDS:
            self._idle_since = Time.now
            if not self.world.chaos.disturbed(Time.now, None, _IDLE_SECONDS):
                self.problem(f"requests wait for memory that has not been used for {_IDLE_SECONDS:g} s")


class NoUnexplainedError(Invariant):
    """No node logs an exception or an error while nothing is wrong, no task fails unseen, and no coroutine is made in
    vain.
    """

    def install(self) -> None:
        def show(message: Any, *_: Any, **__: Any) -> None:
            # What a killed process has begun is never ended.
            if not any(fault.kind in ("kill", "vanish", "drain", "leave") for fault in self.world.plan.faults):
                self.problem(f"warning: {message}")

        warnings.simplefilter("always")
        warnings.showwarning = show

    def logged(self, name: str, method: str, event: dict[str, Any], error: Any) -> None:
        grave = method in ("error", "critical", "exception") or (error and method != "debug")
        if grave and not self.world.chaos.disturbed(Time.now, None, _AFTER_SECONDS):
            self.problem(f"at {name}: {method} {event} {error!r}"[:600])
