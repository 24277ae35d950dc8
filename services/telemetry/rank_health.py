"""The health and the metrics of a rank above 0, which is no worker of its own."""

from dataclasses import dataclass

import structlog

from runtime.telemetry.monitor import Report, status
from services.engines.running import metrics
from services.telemetry.metrics import MODEL_LOAD_SECONDS

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class RankHealth:
    """The health and metrics of a rank. Its methods may be called on any thread (RankProgress)."""

    worker_id: str
    is_ready: bool = False

    def report(self) -> Report:
        """Returns the body of /health: SERVING while the group is ready."""
        return {"status": status(self.is_ready), "worker_id": self.worker_id, "roles": ()}

    def loaded(self, seconds: float) -> None:
        MODEL_LOAD_SECONDS.set(seconds)

    def ready(self) -> None:
        self.is_ready = True
        metrics.RANK_READY.set(1)
        _log.info("the group is ready", worker_id=self.worker_id)

    def stepped(self, tokens: int) -> None:
        metrics.RANK_STEPS.inc()
        metrics.RANK_STEP_TOKENS.inc(tokens)

    def end(self) -> None:
        """Notes that the rank has ended, and its group with it."""
        self.is_ready = False
        metrics.RANK_READY.set(0)
