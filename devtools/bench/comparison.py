"""Several servers under the same load in one run: medians of the rounds, and ratios to the first server."""

import importlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from devtools.bench.report import Summary, save_plot

_COLUMNS = "step | server | output tokens/s | requests/s | TTFT p50 | p99 | ITL p50 | p99 | failed | short"
_RATES: Sequence[Callable[[Summary], float]] = (
    lambda each: each.output_tokens_per_second,
    lambda each: each.requests_per_second,
)
_TIMES: Sequence[Callable[[Summary], float]] = (
    lambda each: each.first_token.p50 * 1e3,
    lambda each: each.first_token.p99 * 1e3,
    lambda each: each.token.p50 * 1e3,
    lambda each: each.token.p99 * 1e3,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One step of one server: a summary for each round."""

    step: str
    server: str
    rounds: tuple[Summary, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows. Those of a step follow one another, the first server's first."""

    rows: tuple[Row, ...]

    def base(self, row: Row) -> Row:
        """The first server's row of the same step."""
        return next(each for each in self.rows if each.step == row.step)


def comparison_markdown(comparison: Comparison) -> str:
    """A table with the medians of each server, and below each further server its ratios to the first."""
    lines = ["# baton bench compare", ""]
    lines += [
        "Times in ms, medians of the rounds. A ratio is the median of those of the rounds, with the least and the"
    ]
    lines += ["most. `short`: answers with fewer tokens than were asked for.", "", f"| {_COLUMNS} |"]
    lines.append("|" + "---|" * (_COLUMNS.count("|") + 1))
    for row in comparison.rows:
        lines.append(f"| {' | '.join(_medians(row))} |")
        if (base := comparison.base(row)) is not row:
            lines.append(f"| {' | '.join(_ratios(row, base))} |")
    failures = [(row, each.errors) for row in comparison.rows for each in row.rounds if each.failed]
    lines += ["", *(f"{row.step}, {row.server} failed: {errors}" for row, errors in failures)]
    return "\n".join(lines).rstrip() + "\n"


def comparison_json(comparison: Comparison) -> str:
    """All numbers of all rounds, with times in seconds."""
    return (
        json.dumps({"title": "baton bench compare", "rows": [asdict(row) for row in comparison.rows]}, indent=2) + "\n"
    )


def comparison_plot(path: Path, comparison: Comparison) -> None:
    """Draws the medians of each server by step. Raises ConfigError if it cannot."""
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots(2, 1, sharex=True, figsize=(8, 7))
    for server in dict.fromkeys(row.server for row in comparison.rows):
        rows = [row for row in comparison.rows if row.server == server]
        steps = [row.step for row in rows]
        axes[0].plot(steps, [_median(row, _TIMES[0]) for row in rows], marker="o", label=server)
        axes[1].plot(steps, [_median(row, _RATES[0]) for row in rows], marker="o", label=server)
    axes[0].set(title="baton bench compare", ylabel="time to first token p50, ms")
    axes[1].set(xlabel="step", ylabel="output tokens a second")
    for each in axes:
        each.legend()
    save_plot(figure, path)


def _medians(row: Row) -> list[str]:
    failed, short = (sum(getattr(each, name) for each in row.rounds) for name in ("failed", "short"))
    rates, times = ([f"{_median(row, get):.{digits}f}" for get in of] for of, digits in ((_RATES, 2), (_TIMES, 2)))
    return [row.step, row.server, *rates, *times, str(failed), str(short)]


def _ratios(row: Row, base: Row) -> list[str]:
    return ["", f"{row.server} / {base.server}", *(_ratio(row, base, get) for get in (*_RATES, *_TIMES)), "", ""]


def _median(row: Row, get: Callable[[Summary], float]) -> float:
    return statistics.median(map(get, row.rounds))


def _ratio(row: Row, base: Row, get: Callable[[Summary], float]) -> str:
    pairs = [(get(each), get(other)) for each, other in zip(row.rounds, base.rounds, strict=True)]
    found = [each / other for each, other in pairs if other]
    if not found:
        return ""
    return f"{statistics.median(found):.2f} ({min(found):.2f} - {max(found):.2f})"
