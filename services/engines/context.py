"""The base of engine configurations, and what a worker passes to its engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.config import Section
from services.engines.memory.allocation import UNSHARED, RoomRules


class EngineConfig(Section):
    """The key `engine`. Each kind of engine has a subclass, with its own `kind` and its own keys."""

    kind: str

    @property
    def allows_fault_injection(self) -> bool:
        """Whether requests may contain fault plans."""
        return False

    def max_node_ids(self, roles: Sequence[str]) -> int:
        """Returns how many workers of a namespace may have node ids; 0 if this engine needs none. See
        EngineContext.node.
        """
        del roles
        return 0


@dataclass(frozen=True, slots=True)
class EngineContext:
    """`node` returns the current node id of this worker, which is unique in the namespace; None without node ids."""

    roles: Sequence[str] = ("prefill", "decode")
    lease_seconds: float = 0.0
    node: Callable[[], int] | None = None
    room: RoomRules = UNSHARED
    log_level: str = "info"  # debug, info, warning, error
