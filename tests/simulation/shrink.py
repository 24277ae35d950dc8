"""The smallest plan that still breaks the same invariant: fewer faults, fewer and simpler requests, a simpler fleet."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from simulation.plan import Plan
from simulation.running import run

Item = TypeVar("Item")


class Shrinker:
    """Makes a plan smaller as long as its first problem is of the same kind."""

    def __init__(self, plan: Plan, most_runs: int = 400) -> None:
        self.plan = plan
        self.runs = 0
        self._most_runs = most_runs
        self.kind = self._kind(plan)

    def shrink(self) -> Plan:
        """Returns the smallest plan that was found."""
        if not self.kind:
            return self.plan
        self._keep(replace(self.plan, hiccup_every=0.0, hiccup_seconds=0.0))
        self._reduce(self.plan.faults, lambda faults: replace(self.plan, faults=tuple(faults)))
        self._reduce(self.plan.requests, lambda requests: replace(self.plan, requests=tuple(requests)))
        self._simplify_requests()
        self._simplify_fleet()
        return self.plan

    def _kind(self, plan: Plan) -> str:
        self.runs += 1
        return run(plan).kind

    def _keep(self, plan: Plan) -> bool:
        if plan == self.plan or self.runs >= self._most_runs or self._kind(plan) != self.kind:
            return False
        self.plan = plan
        return True

    def _reduce(self, items: Sequence[Item], build: Callable[[Sequence[Item]], Plan]) -> None:
        size = max(1, len(items) // 2)
        while size and items:
            at = 0
            while at < len(items):
                fewer = [*items[:at], *items[at + size :]]
                if self._keep(build(fewer)):
                    items = fewer
                else:
                    at += size
            size //= 2

    def _simplify_requests(self) -> None:
        simpler: dict[str, Any] = {
            "image": False, "together": 0, "window": 0, "keep": 0.0, "drops": (), "retries": 0, "tenant": "",
            "leave_after": -1, "leave_seconds": -1.0, "cancel_seconds": -1.0, "timeout": 30.0, "tokens": 2,
            "length": 20,
        }  # fmt: skip
        for index in range(len(self.plan.requests)):
            for name, value in simpler.items():
                requests = list(self.plan.requests)
                requests[index] = replace(requests[index], **{name: value})
                self._keep(replace(self.plan, requests=tuple(requests)))

    def _simplify_fleet(self) -> None:
        for name, value in {"ranks": 1, "encode": 1, "mixed": 0, "early_tokens": 0, "max_running": 0}.items():
            self._keep(replace(self.plan, fleet=replace(self.plan.fleet, **{name: value})))
