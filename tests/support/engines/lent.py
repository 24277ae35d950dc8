"""Workers under test whose engine is one that all tests of a run share: starting one takes minutes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Literal

from services.config import WorkerConfig
from services.engines.base import Engine
from services.engines.context import EngineConfig
from services.engines.registry import ENGINES, EngineKind


class LentConfig(EngineConfig):
    """The engine of a worker under test, which borrows a shared one, of a `side` if the engines differ by role."""

    kind: Literal["lent"] = "lent"
    side: str = ""

    @property
    def allows_fault_injection(self) -> bool:
        return True


def lent_worker(worker_id: str, role: str, lease_seconds: float) -> WorkerConfig:
    """A worker of this role on a shared engine. Use it within `lent_kind`."""
    return WorkerConfig.model_validate(
        {
            "worker_id": worker_id,
            "roles": [role],
            "engine": LentConfig(side=role),
            "handoff": {"lease_seconds": lease_seconds},
            "drain_seconds": 0,
        }
    )


@contextmanager
def lent_kind(lend: Callable[[str], AbstractAsyncContextManager[Engine]]) -> Iterator[None]:
    """Makes the kind of LentConfig known to the registry of engines: `lend` gives the one of a side."""
    ENGINES["lent"] = EngineKind(LentConfig, lambda config, context: lend(config.side))
    try:
        yield
    finally:
        del ENGINES["lent"]
