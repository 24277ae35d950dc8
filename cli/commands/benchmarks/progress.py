"""How far a benchmark has come, on standard error."""

from collections.abc import Sequence

from cli.terminal import errors
from devtools.bench.load import Measured
from devtools.bench.workload import Planned


class Progress:
    """Prints how far a step has come, at most a hundred times."""

    def __init__(self) -> None:
        self._console = errors()
        self._step, self._total, self._done, self._failed = "", 0, 0, 0

    def begin(self, step: str, planned: Sequence[Planned]) -> None:
        """Another step begins."""
        self._step, self._total, self._done, self._failed = step, len(planned), 0, 0

    def ended(self, measured: Measured) -> None:
        """A request has ended."""
        self._done += 1
        self._failed += bool(measured.error)
        if self._done == self._total or self._done % max(1, self._total // 100) == 0:
            end = "\n" if self._done == self._total else "\r"
            self._console.print(f"{self._step}: {self._done} of {self._total}, {self._failed} failed", end=end)
