"""The events that an invariant is told. Each overrides what it needs."""

from collections.abc import Iterator
from typing import Any

from simulation.steps import router_call


class Invariant:
    """One thing that must hold in `world`."""

    def __init__(self, world: Any) -> None:
        self.world = world

    def problem(self, text: str) -> None:
        """It does not hold."""
        self.world.problem(type(self).__name__, text)

    def install(self) -> None:
        """Before anything starts: to watch the product's own functions."""

    def begin(self) -> None:
        """The fleet is ready, and nothing was asked yet."""

    async def measure(self) -> None:
        """All is quiet after a round of the requests."""

    def wants_round(self, number: int) -> bool:
        """True if the requests should come once more, after so many rounds."""
        return False

    def asked(self, client: Any) -> None:
        """A client begins."""

    def ended(self, result: Any) -> None:
        """A client has got its last."""

    def look(self) -> None:
        """Often, while it runs."""

    def logged(self, name: str, method: str, event: dict[str, Any], error: Any) -> None:
        """A node has logged something."""

    def crashed(self, node: Any, error: Exception, text: str) -> None:
        """The process of a node has ended by an exception."""

    def killed(self, node: Any) -> None:
        """The process of a node is gone, and its host has reset its connections."""

    def taken_over(self, process: Any, engine: Any) -> None:
        """The engine of a process with a keeper has got its memory, and has computed nothing yet."""

    def memory_got(self, process: Any, form: str, found: Any) -> None:
        """A process with a keeper has got kept memory that is to have this form, or has made it."""

    def cancelled(self, result: Any, call_id: str) -> None:
        """A kept answer was cancelled by its handle, in which its first call's id is, and the client was told so."""

    def drained(self, node: Any) -> None:
        """A node should have ended in order by now."""

    def end(self) -> None:
        """All requests have ended, all faults are over, and every lease and deadline has passed."""

    # What several ask for.

    def workers(self) -> "Iterator[tuple[str, Any]]":
        """The workers that run, and are not held."""
        for name in self.world.workers:
            if self.world.is_up(name) and not self.world.nodes[name].paused:
                yield name, self.world.hosts[name]

    def routers(self) -> "Iterator[tuple[str, Any]]":
        """The routers that run, and are not held."""
        for name in self.world.plan.fleet.router_names:
            if self.world.is_up(name) and not self.world.nodes[name].paused:
                yield name, self.world.hosts[name]


def engine_of(worker: Any) -> Any:
    """The simulated engine of a worker; None of one that only encodes."""
    return worker.engines.engine


def calls_of(worker: Any) -> Any:
    """The table of a worker's running calls."""
    return worker.drainer._calls


def running_at(worker: Any) -> "Iterator[tuple[str, str]]":
    """The kind of each call that runs at a worker, and the call of a router that it is for; encoding is for several."""
    return ((kind, call_id if kind == "encode" else router_call(call_id)) for kind, call_id in calls_of(worker)._calls)
