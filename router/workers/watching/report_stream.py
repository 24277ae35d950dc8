"""A stream of reports that a router reads from a worker: whether it is lost, in a warning and in a metric.

A worker's load between its reports, corrected by what this router has sent there and seen end.
"""

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

    def __exit__(self, *exception: object) -> None:
        self._record(is_lost=False)

    def arrived(self) -> None:
        """Notes a report: the stream is not lost, or no longer."""
        if self._is_lost:
            log.info("a worker's reports arrive again", reports=self._reports, worker_id=self._worker_id)
            self._record(is_lost=False)

    def lost(self, reason: str) -> None:
        """Notes that the stream has ended though the worker is registered, or that it could not be begun."""
        if not self._is_lost:
            log.warning("a worker's reports are lost", reports=self._reports, worker_id=self._worker_id, reason=reason)
            self._record(is_lost=True)

    def _record(self, *, is_lost: bool) -> None:
        self._lost.inc(is_lost - self._is_lost)
        self._is_lost = is_lost


class CorrectedLoad:
    """One number of a worker's reports, such as its requests.

    A report counts a moment since the last one, and arrives later. So it is compared with the least and the most that
    this router had there since: compared with what is there as it arrives, each request that has just ended or begun
    would count wrongly until the next report.
    """

    __slots__ = ("_least", "_most", "elsewhere", "sent")

    def __init__(self) -> None:
        self.sent = self._least = self._most = 0  # by this router: now, and since the last report
        self.elsewhere = 0  # reported, and not explained by this router's; negative if less was reported than these

    @property
    def value(self) -> int:
        """The load now."""
        found = self.elsewhere + self.sent
        return found if found > 0 else 0  # without a call: each decision asks all workers

    def add(self, amount: int) -> None:
        """Adds what this router sends."""
        self.sent = sent = self.sent + amount
        if sent > self._most:
            self._most = sent

    def remove(self, amount: int) -> None:
        """Removes what has ended."""
        self.sent = sent = self.sent - amount
        if sent < self._least:
            self._least = sent

    def reported(self, amount: int) -> None:
        """Corrects the load by a report."""
        self.elsewhere = amount - min(max(amount, self._least), self._most)
        self._least = self._most = self.sent
