"""A stream of reports that a router reads from a worker: whether it is lost, in a warning and in a metric."""

from types import TracebackType

import structlog
from typing_extensions import Self

from router.telemetry import metrics

log = structlog.get_logger(__name__)


class ReportStream:
    """For the reader of one worker's reports of one kind, which subscribes again by itself. A context manager: leaving
    it says that no reports are expected any more.

    The metric counts the streams that are lost now; the log has one warning for each time that one is lost.
    """

    def __init__(self, reports: str, worker_id: str) -> None:
        self._lost = metrics.LOST_REPORTS.labels(reports)
        self._reports = reports
        self._worker_id = worker_id
        self._is_lost = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._note(is_lost=False)

    def arrived(self) -> None:
        """Notes a report: the stream is not lost, or no longer."""
        if self._is_lost:
            log.info("a worker's reports arrive again", reports=self._reports, worker_id=self._worker_id)
            self._note(is_lost=False)

    def lost(self, reason: str) -> None:
        """Notes that the stream has ended though the worker is registered, or that it could not be begun."""
        if not self._is_lost:
            log.warning("a worker's reports are lost", reports=self._reports, worker_id=self._worker_id, reason=reason)
            self._note(is_lost=True)

    def _note(self, *, is_lost: bool) -> None:
        self._lost.inc(is_lost - self._is_lost)
        self._is_lost = is_lost
