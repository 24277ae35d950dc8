"""Draws the pictures in examples/, larger than the model's input; the image processor scales them down.

python -m models.demo.draw_examples
"""

from pathlib import Path
from types import MappingProxyType

from PIL import Image

from models.demo.exercises.scenes import Figure, Scene, draw

EXAMPLES = Path(__file__).parent / "examples"

_SIDE = 256
_COLORS_IN_PNG = 64

SCENES = MappingProxyType(
    {
        "circle-and-square.png": Scene(
            (Figure("red", "circle", 20, 23, 11), Figure("blue", "square", 44, 41, 12)),
            background=(250, 248, 240),
        ),
        "four-shapes.png": Scene(
            (
                Figure("yellow", "star", 12, 44, 11),
                Figure("green", "triangle", 24, 17, 10),
                Figure("purple", "circle", 39, 46, 9),
                Figure("black", "star", 53, 19, 10),
            ),
            background=(232, 240, 250),
        ),
    }
)
"""Returns the scene of each file."""


def example(name: str) -> Image.Image:
    """Returns the picture of an example, with few enough colours to be a small file."""
    return draw(SCENES[name], _SIDE).quantize(_COLORS_IN_PNG)


def main() -> None:
    """Writes the files."""
    EXAMPLES.mkdir(exist_ok=True)
    for name in SCENES:
        example(name).save(EXAMPLES / name, optimize=True)


if __name__ == "__main__":
    main()
