"""Cancels by handle, and the replies of one process to another."""

from typing import Any

from baton.errors import InvalidReply
from simulation.entropy import Time
from simulation.invariants.base import Invariant, running_at

_STOP_SECONDS = 1.5  # until a cancellation has reached every worker, as in ends.py
_AFTER_SECONDS = 30.0


class CancelsByHandleHold(Invariant):
    """A kept answer that its client has cancelled by its handle is decoded nowhere a moment later, and does not begin
    later either: whichever router was asked, and wherever the answer was.
    """

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._cancelled: dict[str, tuple[float, Any]] = {}  # by the call's id: since when, and the client's result

    def cancelled(self, result: Any, call_id: str) -> None:
        others = [other for other, first in self.world.steps.first.items() if first == call_id]
        seconds = _STOP_SECONDS + 4 * self.world.plan.hiccup_seconds
        self._cancelled |= dict.fromkeys([call_id, *others], (Time.now + seconds, result))

    def look(self) -> None:
        for name, worker in self.workers() if self._cancelled else ():
            for kind, call_id in running_at(worker):
                if kind == "decode" and call_id in self._cancelled:
                    self._check(name, call_id)

    def _check(self, name: str, call_id: str) -> None:
        since, result = self._cancelled[call_id]
        if Time.now < since:
            return
        del self._cancelled[call_id]
        # A worker or router that was cut off has not heard of the cancel.
        if not self.world.chaos.disturbed(result.started, {name, *self.world.plan.fleet.router_names}, _AFTER_SECONDS):
            self.problem(f"{result.name}: {name} decodes it after it was cancelled by its handle")


class RepliesAreRight(Invariant):
    """No process finds a reply of another one of the fleet wrong."""

    def install(self) -> None:
        begin = InvalidReply.__init__

        def beginning(error: InvalidReply, message: str, **where: Any) -> None:
            begin(error, message, **where)
            node = self.world.loop.current
            self.problem(f"at {node.name if node else '-'}: {message}")

        InvalidReply.__init__ = beginning  # type: ignore[method-assign]
