"""Draws the panels of a dashboard where Grafana would place them, with matplotlib."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.dashboards.run import Recording, Series

matplotlib.use("agg")

# Grafana's grid has 24 columns; these are inches of the picture.
COLUMN, ROW = 0.75, 0.42
LEGEND_LINES = 6
LEGEND_ALPHA = 0.6
# Of what Grafana writes as a unit: what to divide by, and what to write.
UNITS = {"percentunit": (0.01, "%"), "bytes": (2**20, "MiB"), "Bps": (2**20, "MiB/s"), "s": (1.0, "s")}


def draw(dashboard: Any, recording: Recording, picture: Path) -> list[str]:
    """Writes the picture; returns the titles of panels that have no data."""
    panels = [panel for panel in dashboard["panels"] if panel["type"] in ("row", "timeseries", "heatmap", "stat")]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(24 * COLUMN, rows * ROW + 0.8))
    figure.suptitle(f"{dashboard['title']}: a decode worker is killed at {recording.fault_seconds:.0f} s", y=0.998)
    empty = []
    for panel in panels:
        place = panel["gridPos"]
        top = (place["y"] * ROW + 0.8) / figure.get_figheight()
        height = place["h"] * ROW / figure.get_figheight()
        if panel["type"] == "row":
            figure.text(0.01, 1 - top - height / 2, panel["title"], weight="bold", va="center", size=11)
            continue
        # Inside its place, room for the numbers on the axes.
        box = ((place["x"] + 0.9) / 24, 1 - top - height * 0.84, (place["w"] - 1.3) / 24, height * 0.68)
        if not _panel(figure.add_axes(box), panel, recording):
            empty.append(panel["title"])
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=60)
    return empty


def _panel(axes: Axes, panel: Any, recording: Recording) -> bool:
    """Draws one panel; whether it has data."""
    divisor, unit = UNITS.get(panel.get("fieldConfig", {}).get("defaults", {}).get("unit", ""), (1.0, ""))
    axes.set_title(panel["title"] + (f" ({unit})" if unit else ""), size=9, loc="left")
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    found = [
        (_legend(target.get("legendFormat", ""), series), series)
        for target in panel["targets"]
        for series in recording.query(target["expr"])
        if any(math.isfinite(value) for value in series.values)
    ]
    if not found:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", color="grey", transform=axes.transAxes)
        return False
    if panel["type"] == "heatmap":
        _heatmap(axes, [series for _, series in found])
    else:
        for name, series in found:
            axes.plot(series.times, [value / divisor for value in series.values], linewidth=1, label=name[:40])
        axes.set_ylim(bottom=0)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(
            handles[:LEGEND_LINES], labels[:LEGEND_LINES], fontsize=6, loc="upper left", framealpha=LEGEND_ALPHA
        )
    axes.axvline(recording.fault_seconds, color="red", linestyle=":", linewidth=1)
    return True


def _heatmap(axes: Axes, buckets: Sequence[Series]) -> None:
    """Cumulative buckets of a histogram become what fell into each one."""
    ordered = sorted(buckets, key=lambda series: float(series.labels["le"]))
    below: dict[float, float] = {}
    for index, series in enumerate(ordered):
        counts = []
        for at, value in zip(series.times, series.values, strict=True):
            counts.append(max(value - below.get(at, 0.0), 0.0))
            below[at] = value
        axes.scatter(series.times, [index] * len(counts), c=counts, cmap="Oranges", marker="s", s=12)
    axes.set_yticks(range(0, len(ordered), 3), [ordered[index].labels["le"] for index in range(0, len(ordered), 3)])


def _legend(pattern: str, series: Series) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: series.labels.get(match[1], ""), pattern) or str(series.labels)
