"""The report of a benchmark and its progress; its files are refused at the start if they cannot be written."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from cli.outputs import explained, require_writable, write_text
from cli.terminal import errors
from devtools.bench import report
from devtools.bench.comparison import Comparison, comparison_json, comparison_markdown, comparison_plot
from devtools.bench.load import Measured
from devtools.bench.report import Summary, Targets
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


def check_files(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for an output that could not be written once everything is measured."""
    if arguments.plot is not None:
        report.check_plot(Path(arguments.plot))
    files = {"--markdown": arguments.markdown, "--json": arguments.json, "--plot": arguments.plot}
    require_writable(files)


def write_steps(arguments: argparse.Namespace, summaries: Sequence[Summary], targets: Targets) -> None:
    """Prints the report of one server, and writes it where the options say."""
    title = " ".join(filter(None, ["baton bench", arguments.action, arguments.mode]))
    _write(arguments, report.markdown(title, summaries, targets), report.as_json(title, summaries, targets))
    if arguments.plot is not None:
        with explained("--plot", arguments.plot):
            report.plot(Path(arguments.plot), title, summaries)


def write_comparison(arguments: argparse.Namespace, comparison: Comparison) -> None:
    """The same of several servers."""
    _write(arguments, comparison_markdown(comparison), comparison_json(comparison))
    if arguments.plot is not None:
        with explained("--plot", arguments.plot):
            comparison_plot(Path(arguments.plot), comparison)


def _write(arguments: argparse.Namespace, markdown: str, json: str) -> None:
    print(markdown, end="")
    if arguments.markdown is not None:
        write_text("--markdown", arguments.markdown, markdown)
    if arguments.json is not None:
        write_text("--json", arguments.json, json)
