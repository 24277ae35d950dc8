"""Pictures of coloured shapes on a plain background, drawn from a description."""

import math
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from types import MappingProxyType

from PIL import Image, ImageDraw

SIDE = 64
CELLS = 4
CELL = SIDE // CELLS
"""Shapes stand in different columns of a grid of cells, so 'from left to right' has one meaning. A cell is a patch."""

COLORS = MappingProxyType(
    {
        "black": (30, 30, 30),
        "blue": (40, 80, 220),
        "green": (40, 160, 60),
        "purple": (150, 50, 190),
        "red": (220, 40, 40),
        "yellow": (240, 200, 30),
    }
)

SHAPES = ("circle", "square", "star", "triangle")

_SMALLEST_RADIUS = 6.0
_LARGEST_RADIUS = 8.0
_JITTER = 3.0
_SMOOTHING = 2

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Figure:
    """One shape; lengths in pixels of a picture of SIDE by SIDE."""

    color: str
    shape: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        """Such as 'red circle'."""
        return f"{self.color} {self.shape}"

    @property
    def cell(self) -> int:
        """Which patch the centre is in, counted in reading order."""
        return int(self.y // CELL) * CELLS + int(self.x // CELL)

    def touches(self, other: "Figure") -> bool:
        """Whether less than a pixel is between the two."""
        return math.hypot(self.x - other.x, self.y - other.y) < self.radius + other.radius + 1


@dataclass(frozen=True, slots=True)
class Scene:
    """One to four figures from left to right, none touching another, on a light background."""

    figures: tuple[Figure, ...]
    background: tuple[int, int, int]


def random_scene(random: Random) -> Scene:
    """Draws a scene, all numbers of figures being equally likely."""
    background = (random.randint(225, 255), random.randint(225, 255), random.randint(225, 255))
    columns = sorted(random.sample(range(CELLS), random.randint(1, CELLS)))
    while True:
        figures = tuple(_random_figure(random, column) for column in columns)
        if not any(left.touches(right) for left, right in pairwise(figures)):
            return Scene(figures, background)


def _random_figure(random: Random, column: int) -> Figure:
    radius = random.uniform(_SMALLEST_RADIUS, _LARGEST_RADIUS)
    return Figure(
        color=random.choice(tuple(COLORS)),
        shape=random.choice(SHAPES),
        x=_coordinate(random, column, radius),
        y=_coordinate(random, random.randrange(CELLS), radius),
        radius=radius,
    )


def _coordinate(random: Random, cell: int, radius: float) -> float:
    middle = (cell + 0.5) * CELL + random.uniform(-_JITTER, _JITTER)
    return round(min(max(middle, radius), SIDE - radius), 2)


def draw(scene: Scene, side: int = SIDE) -> Image.Image:
    """The picture of a scene, `side` pixels wide and high, with smooth edges."""
    scale = side * _SMOOTHING / SIDE
    canvas = Image.new("RGB", (side * _SMOOTHING, side * _SMOOTHING), scene.background)
    pen = ImageDraw.Draw(canvas)
    for figure in scene.figures:
        pen.polygon([(x * scale, y * scale) for x, y in _outline(figure)], fill=COLORS[figure.color])
    return canvas.reduce(_SMOOTHING)


def _outline(figure: Figure) -> list[Point]:
    return [(figure.x + x * figure.radius, figure.y + y * figure.radius) for x, y in _OUTLINES[figure.shape]]


def _corners(count: int, first_turn: float = -0.25, radii: tuple[float, ...] = (1.0,)) -> tuple[Point, ...]:
    """Points around the unit circle; `first_turn` is the angle of the first one in turns, `radii` alternate."""
    angles = [2 * math.pi * (first_turn + index / count) for index in range(count)]
    return tuple(
        (radii[index % len(radii)] * math.cos(angle), radii[index % len(radii)] * math.sin(angle))
        for index, angle in enumerate(angles)
    )


_OUTLINES = MappingProxyType(
    {
        "circle": _corners(32),
        "square": _corners(4, first_turn=0.125, radii=(1.15,)),
        "star": _corners(10, radii=(1.15, 0.46)),
        "triangle": _corners(3, radii=(1.15,)),
    }
)
