"""What an engine is opened for: of a worker's settings, those that an engine may have to know."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Purpose:
    """`node` says which number this worker has now that no other one of the namespace has; None where none has any."""

    roles: Sequence[str] = ("prefill", "decode")
    lease_seconds: float = 0.0
    node: Callable[[], int] | None = None
    log_level: str = "info"  # debug, info, warning, error
