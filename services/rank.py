"""A rank above 0 of another worker's engine: a process with metrics and health that registers nowhere."""

import asyncio
from dataclasses import dataclass

import structlog

from baton.errors import EngineFailed
from runtime.monitor import MonitorServer, Report, status
from services.config import WorkerConfig
from services.engines.registry import follow
from services.telemetry import metrics
from services.worker import exit_soon

_log = structlog.get_logger(__name__)


async def follow_as_rank(config: WorkerConfig, monitor: MonitorServer, stopping: asyncio.Event) -> None:
    """Runs until rank 0 ends it, or until `stopping` while the group is not ready.

    /health is SERVING while the group is ready. Raises ConfigError, and EngineFailed if rank 0 is lost; the
    process then ends within seconds, even if a computation hangs.
    """
    health = RankHealth(config.worker_id)
    monitor.answer_with(health.report)
    try:
        await follow(config.engine, health, stopping)
    except EngineFailed:
        exit_soon()
        raise
    finally:
        health.is_ready = False
        metrics.RANK_READY.set(0)
    _log.info("the rank has ended", worker_id=config.worker_id)


@dataclass(slots=True)
class RankHealth:
    """The health and the metrics of a rank above 0. See RankProgress."""

    worker_id: str
    is_ready: bool = False

    def report(self) -> Report:
        """Returns the body of /health."""
        return {"status": status(self.is_ready), "worker_id": self.worker_id, "roles": ()}

    def loaded(self, seconds: float) -> None:
        """See RankProgress."""
        metrics.MODEL_LOAD_SECONDS.set(seconds)

    def ready(self) -> None:
        """See RankProgress."""
        self.is_ready = True
        metrics.RANK_READY.set(1)
        _log.info("the group is ready", worker_id=self.worker_id)

    def stepped(self, tokens: int) -> None:
        """See RankProgress."""
        metrics.RANK_STEPS.inc()
        metrics.RANK_STEP_TOKENS.inc(tokens)
