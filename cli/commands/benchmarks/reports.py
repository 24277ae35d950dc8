"""The files of a benchmark's report: refused before anything is measured if they cannot be written."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from cli.outputs import require_writable, write_text
from devtools.bench import report
from devtools.bench.comparison import Comparison, comparison_json, comparison_markdown, comparison_plot
from devtools.bench.summary import Summary, Targets


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
        report.plot(Path(arguments.plot), title, summaries)


def write_comparison(arguments: argparse.Namespace, comparison: Comparison) -> None:
    """The same of several servers."""
    _write(arguments, comparison_markdown(comparison), comparison_json(comparison))
    if arguments.plot is not None:
        comparison_plot(Path(arguments.plot), comparison)


def _write(arguments: argparse.Namespace, markdown: str, json: str) -> None:
    print(markdown, end="")
    if arguments.markdown is not None:
        write_text("--markdown", arguments.markdown, markdown)
    if arguments.json is not None:
        write_text("--json", arguments.json, json)
