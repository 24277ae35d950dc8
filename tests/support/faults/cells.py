"""The fault matrix: which disturbance happens to which role at which step of a request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Step = Literal["encoding", "queued", "prefilling", "held", "pulling", "confirming", "decoding"]
Target = Literal["encode", "prefill", "decode", "router"]
Disturbance = Literal["kill", "pause", "cut", "freeze", "leave", "deadline", "cancel"]

STEPS: tuple[Step, ...] = get_args(Step)
# An embedding is computed, held under a lease, read, and released.
WITH_IMAGES: tuple[Step, ...] = ("encoding", "queued", "prefilling", "decoding")
TARGETS: tuple[Target, ...] = get_args(Target)
# Disturbances of a process or of its network, and of a client.
TO_PROCESSES: tuple[Disturbance, ...] = ("kill", "pause", "cut", "freeze")
BY_CLIENTS: tuple[Disturbance, ...] = ("leave", "deadline", "cancel")

# The fault plan that keeps a request at a step for a while; prefill and decode take long anyway.
HOLD_SECONDS = 0.8
HOLDS: dict[Step, str] = {
    "encoding": f"delay={HOLD_SECONDS}@encode",
    "queued": f"delay={HOLD_SECONDS}@queue",
    "held": f"delay={HOLD_SECONDS}@held",
    "pulling": f"delay={HOLD_SECONDS}@pull",
    "confirming": f"delay={HOLD_SECONDS}@confirm",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry of the matrix. `target` is "client" for what clients do."""

    target: str
    step: Step
    disturbance: Disturbance

    @property
    def has_image(self) -> bool:
        """True if its requests have an image."""
        return self.target == "encode" or self.step == "encoding"

    @property
    def node(self) -> str:
        """The name of the disturbed process."""
        return f"{self.target}-0"


def all_cells() -> list[Cell]:
    """Every one."""
    disturbed = [Cell(target, step, what) for what in TO_PROCESSES for target in TARGETS for step in _steps(target)]
    return disturbed + [Cell("client", step, what) for what in BY_CLIENTS for step in STEPS]


def sample(transport: str) -> list[Cell]:
    """A few cells. Over both transports they have every target, every disturbance and nearly every step."""
    disturbed = [
        Cell(target, _cyclic(_steps(target), index + index // len(TARGETS)), what)
        for index, (what, target) in enumerate((what, target) for what in TO_PROCESSES for target in TARGETS)
    ]
    clients = [Cell("client", _cyclic(STEPS, 2 * index + 1), what) for index, what in enumerate(BY_CLIENTS)]
    return disturbed[::5] + clients[:2] if transport == "shm" else disturbed[2::5] + clients[2:]


def _steps(target: Target) -> Sequence[Step]:
    """The steps that differ for a role."""
    return WITH_IMAGES if target == "encode" else STEPS


def _cyclic(steps: Sequence[Step], index: int) -> Step:
    return steps[index % len(steps)]
