"""Bars as SVG: for each load the microseconds of each router."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_COLOURS = ("#1f6f8b", "#e08e45", "#7a9e7e", "#9b5094", "#8d6b4b", "#4b5f8d")
_WIDTH, _LABEL, _BAR, _GAP = 860, 210, 15, 22


def bars(title: str, groups: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> str:
    """One group of bars for each load, one bar for each name that has a value there; each group has its own scale."""
    parts: list[str] = [_text(10, 22, title, 15)]
    y = 44
    for load, values in groups.items():
        parts.append(_text(10, y + 10, load, 12))
        y += _GAP
        largest = max(values.values(), default=1.0)
        for index, name in enumerate(names):
            if name in values:
                parts += _bar(y, name, values[name], values[name] / largest, _COLOURS[index % len(_COLOURS)])
                y += _BAR + 3
        y += _GAP // 2
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 10}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _bar(y: int, name: str, value: float, share: float, colour: str) -> list[str]:
    width = round(share * (_WIDTH - _LABEL - 90))
    return [
        _text(24, y + 12, name, 11),
        f'<rect x="{_LABEL}" y="{y}" width="{width}" height="{_BAR}" fill="{colour}"/>',
        _text(_LABEL + width + 6, y + 12, f"{value:.1f}", 11),
    ]


def _text(x: int, y: int, text: str, size: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}">{escape(text)}</text>'
