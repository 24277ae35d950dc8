"""The table that `make faults` prints."""

from collections import Counter
from collections.abc import Sequence

from support.faults.trials import Report

_HEAD = (
    "role",
    "step",
    "fault",
    "requests",
    "right",
    "migrations",
    "errors by reason",
    "slowest s",
    "blocks",
    "free s",
)


def table(title: str, reports: Sequence[Report]) -> str:
    """The reports as lines of equal columns, with a sum."""
    rows = [_HEAD, *(_row(report) for report in reports)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:], _sum(reports)])


def _row(report: Report) -> tuple[str, ...]:
    cell = report.cell
    return (
        cell.target,
        cell.step,
        cell.disturbance,
        str(report.requests),
        str(report.ends["right"]),
        str(report.migrations),
        _errors(report.ends),
        f"{report.slowest_seconds:.1f}",
        str(report.blocks),
        f"{report.settled_seconds:.1f}",
    )


def _errors(ends: Counter[str]) -> str:
    return " ".join(f"{label}:{count}" for label, count in sorted(ends.items()) if label != "right") or "-"


def _sum(reports: Sequence[Report]) -> str:
    ends: Counter[str] = sum((report.ends for report in reports), Counter())
    slowest = max(report.slowest_seconds for report in reports)
    return f"{sum(ends.values())} requests: {ends['right']} right, {_errors(ends)}; slowest {slowest:.1f} s"
