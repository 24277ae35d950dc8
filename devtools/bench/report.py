"""The summaries of a benchmark as Markdown, JSON and a plot."""

import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from devtools.bench.summary import Summary, Targets

_COLUMNS = (
    "step | requests | failed | requests/s | output tokens/s | TTFT p50 | p90 | p99 | ITL p50 | p90 | p99"
    " | goodput/s | good | hit rate | busiest / mean"
)


def markdown(title: str, summaries: Sequence[Summary], targets: Targets) -> str:
    """A table with a row for each step. Times are in milliseconds."""
    lines = [f"# {title}", "", f"Times in ms. {_targets(targets)}", "", f"| {_COLUMNS} |"]
    lines.append("|" + "---|" * (_COLUMNS.count("|") + 1))
    lines += [f"| {' | '.join(_cells(each))} |" for each in summaries]
    lines += ["", *(f"{each.step} failed: {each.errors}" for each in summaries if each.failed)]
    lines += [f"{each.step}: {each.short} answers have fewer tokens than asked" for each in summaries if each.short]
    return "\n".join(lines).rstrip() + "\n"


def as_json(title: str, summaries: Sequence[Summary], targets: Targets) -> str:
    """All numbers, with times in seconds."""
    whole = {"title": title, "targets": asdict(targets), "steps": [asdict(each) for each in summaries]}
    return json.dumps(whole, indent=2) + "\n"


def check_plot(path: Path) -> None:
    """Raises ConfigError if there is no matplotlib to plot with, or if it cannot draw files named like `path`."""
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ImportError as error:
        raise ConfigError("--plot: needs matplotlib; install it with `pip install 'baton-serving[bench]'`") from error
    canvas = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    kind = path.suffix.removeprefix(".").lower()
    if kind and kind not in canvas.get_supported_filetypes():
        raise ConfigError(
            f"--plot: matplotlib cannot write {path}: name a file that ends in .png, .pdf or .svg, for example"
        )


def plot(path: Path, title: str, summaries: Sequence[Summary]) -> None:
    """Draws time to first token and throughput by step. Raises ConfigError if it cannot."""
    check_plot(path)
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots(2, 1, sharex=True, figsize=(8, 7))
    steps = [each.step for each in summaries]
    for name in ("p50", "p90", "p99"):
        axes[0].plot(steps, [getattr(each.first_token, name) * 1e3 for each in summaries], marker="o", label=name)
    axes[0].set(title=title, ylabel="time to first token, ms")
    axes[1].plot(steps, [each.requests_per_second for each in summaries], marker="o", label="answered")
    axes[1].plot(steps, [each.goodput for each in summaries], marker="o", label="within the targets")
    axes[1].set(xlabel="step", ylabel="requests a second")
    for each in axes:
        each.legend()
    save_plot(figure, path)


def save_plot(figure: Any, path: Path) -> None:
    """Writes matplotlib's figure. Raises ConfigError if it cannot."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error.strerror or error}") from error


def _targets(targets: Targets) -> str:
    parts = []
    if targets.first_token_seconds:
        parts.append(f"the first token within {targets.first_token_seconds * 1e3:g} ms")
    if targets.token_seconds:
        parts.append(f"{targets.token_seconds * 1e3:g} ms a token on average")
    return f"Good answers: {' and '.join(parts)}." if parts else "No targets: every answer is good."


def _cells(summary: Summary) -> list[str]:
    times = [
        f"{seconds * 1e3:.1f}"
        for percentiles in (summary.first_token, summary.token)
        for seconds in (percentiles.p50, percentiles.p90, percentiles.p99)
    ]
    return [
        summary.step,
        str(summary.requests),
        str(summary.failed),
        f"{summary.requests_per_second:.2f}",
        f"{summary.output_tokens_per_second:.1f}",
        *times,
        f"{summary.goodput:.2f}",
        f"{summary.good_share:.0%}",
        f"{summary.hit_rate:.3f}",
        f"{summary.busiest:.2f}",
    ]
