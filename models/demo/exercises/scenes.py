"""Pictures of coloured shapes on a plain background, drawn from a description."""

import math
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from PIL import Image, ImageDraw

SIDE = 64
CELL = 16
CELLS = SIDE // CELL
"""A cell is one patch of the vision tower; the centres of two figures of a scene are never in the same cell."""

COLORS = MappingProxyType(
    {
        "black": (30, 30, 30),
        "blue": (25, 45, 220),
        "green": (30, 160, 40),
        "purple": (145, 35, 165),
        "red": (220, 30, 30),
        "yellow": (235, 210, 25),
    }
)

SHAPES = ("circle", "square", "star", "triangle")

_MOST_FIGURES = 4
_SMALLEST_RADIUS = 6.0
_LARGEST_RADIUS = 12.0
_STEP_RIGHT = 6.0
_TRIES = 40
_TINT = 30
_DARKEST_BACKGROUND = 205
_SMOOTHING = 2

Color = tuple[int, int, int]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Figure:
    """One upright shape in a circle around (x, y); lengths in pixels of a picture of SIDE by SIDE.

    `tint` is added to the colour in the figure's name.
    """

    color: str
    shape: str
    x: float
    y: float
    radius: float
    tint: Color = (0, 0, 0)

    @property
    def name(self) -> str:
        """For example 'red circle'."""
        return f"{self.color} {self.shape}"

    @property
    def cell(self) -> int:
        """The patch of the centre, counted in reading order."""
        return int(self.y // CELL) * CELLS + int(self.x // CELL)

    @property
    def fill(self) -> Color:
        """Red, green and blue."""
        red, green, blue = (min(max(sum(parts), 0), 255) for parts in zip(COLORS[self.color], self.tint, strict=True))
        return (red, green, blue)

    def is_apart_from(self, other: "Figure") -> bool:
        """True if there is a pixel between the circles around the two, and one is clearly to the right."""
        across, down = self.x - other.x, self.y - other.y
        distance = math.hypot(across, down)
        return distance >= self.radius + other.radius + 1 and abs(across) >= _STEP_RIGHT and self.cell != other.cell


@dataclass(frozen=True, slots=True)
class Scene:
    """One to four figures on a light background, each clearly to the right of the previous one, none
    touching another.
    """

    figures: tuple[Figure, ...]
    background: Color


def random_scene(random: Random) -> Scene:
    """Returns a random scene; all numbers of figures are equally likely."""
    figures = _random_figures(random, random.randint(1, _MOST_FIGURES))
    return Scene(tuple(sorted(figures, key=lambda figure: figure.x)), _three(random, _DARKEST_BACKGROUND, 255))


def _random_figures(random: Random, count: int) -> list[Figure]:
    figures: list[Figure] = []
    for _ in range(_TRIES):
        figure = _random_figure(random)
        if all(figure.is_apart_from(other) for other in figures):
            figures.append(figure)
        if len(figures) == count:
            return figures
    # The first figures may leave no space for the others.
    return _random_figures(random, count)


def _random_figure(random: Random) -> Figure:
    radius = round(random.uniform(_SMALLEST_RADIUS, _LARGEST_RADIUS), 2)
    return Figure(
        color=random.choice(tuple(COLORS)),
        shape=random.choice(SHAPES),
        x=round(random.uniform(radius, SIDE - radius), 2),
        y=round(random.uniform(radius, SIDE - radius), 2),
        radius=radius,
        tint=_three(random, -_TINT, _TINT),
    )


def _three(random: Random, low: int, high: int) -> Color:
    return (random.randint(low, high), random.randint(low, high), random.randint(low, high))


def draw(scene: Scene, side: int = SIDE) -> Image.Image:
    """Returns the picture of a scene, `side` pixels wide and high, with smooth edges."""
    scale = side * _SMOOTHING / SIDE
    canvas = Image.new("RGB", (side * _SMOOTHING, side * _SMOOTHING), scene.background)
    pen = ImageDraw.Draw(canvas)
    for figure in scene.figures:
        pen.polygon([(x * scale, y * scale) for x, y in _outline(figure)], fill=figure.fill)
    return canvas.reduce(_SMOOTHING)


def _outline(figure: Figure) -> list[Point]:
    return [(figure.x + x * figure.radius, figure.y + y * figure.radius) for x, y in _OUTLINES[figure.shape]]


def _corners(count: int, first_turn: float = -0.25, radii: tuple[float, ...] = (1.0,)) -> tuple[Point, ...]:
    """Returns points around the unit circle; `first_turn` is the angle of the first one in turns, `radii` alternate."""
    angles = [2 * math.pi * (first_turn + index / count) for index in range(count)]
    return tuple(
        (radii[index % len(radii)] * math.cos(angle), radii[index % len(radii)] * math.sin(angle))
        for index, angle in enumerate(angles)
    )


_OUTLINES = MappingProxyType(
    {
        "circle": _corners(32, radii=(0.9,)),
        "square": _corners(4, first_turn=0.125),
        "star": _corners(10, radii=(1.0, 0.4)),
        "triangle": _corners(3),
    }
)
