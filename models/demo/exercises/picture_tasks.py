"""The picture tasks: questions about one scene, or about one of two scenes."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from models.demo.exercises.exercise import IMAGE, Exercise, Task
from models.demo.exercises.scenes import COLORS, SHAPES, Scene, random_scene

COLOR_WORDS = ("color", "color", "colour")


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a scene in the prompt, and its answer."""

    text: str
    answer: str


Asking = Callable[[Random, Scene], Question]


def describe(random: Random, scene: Scene) -> Question:
    """All figures, from left to right."""
    noun = random.choice(("picture", "picture", "image"))
    return Question(f"What is in the {noun}?", _in_words([f"a {figure.name}" for figure in scene.figures]))


def _in_words(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def count_all(random: Random, scene: Scene) -> Question:
    """The number of figures."""
    del random
    return Question("How many shapes are there?", str(len(scene.figures)))


def count_shape(random: Random, scene: Scene) -> Question:
    """The number of figures of one shape, which may be 0."""
    shape = random.choice((random.choice(SHAPES), random.choice(scene.figures).shape))
    return Question(f"How many {shape}s are there?", str(sum(figure.shape == shape for figure in scene.figures)))


def color_of_shape(random: Random, scene: Scene) -> Question:
    """The colour of a shape that occurs once; if there is none, that of the leftmost figure."""
    word = random.choice(COLOR_WORDS)
    single = _once([figure.shape for figure in scene.figures])
    if not single:
        return Question(f"What {word} is the shape on the left?", scene.figures[0].color)
    shape = random.choice(single)
    color = next(figure.color for figure in scene.figures if figure.shape == shape)
    return Question(f"What {word} is the {shape}?", color)


def shape_of_color(random: Random, scene: Scene) -> Question:
    """The shape of the only figure of a colour; if there is none, that of the rightmost figure."""
    single = _once([figure.color for figure in scene.figures])
    if not single:
        return Question("What shape is on the right?", scene.figures[-1].shape)
    color = random.choice(single)
    shape = next(figure.shape for figure in scene.figures if figure.color == color)
    return Question(f"What shape is {color}?", shape)


def _once(values: Sequence[str]) -> list[str]:
    return sorted(value for value, times in Counter(values).items() if times == 1)


def is_there(random: Random, scene: Scene) -> Question:
    """True if there is a figure of one colour and shape; half of the answers are yes."""
    name = random.choice((f"{random.choice(tuple(COLORS))} {random.choice(SHAPES)}", random.choice(scene.figures).name))
    return Question(f"Is there a {name}?", "yes" if any(figure.name == name for figure in scene.figures) else "no")


ASKINGS: tuple[Asking, ...] = (describe, count_all, count_shape, color_of_shape, shape_of_color, is_there)


def _about_one(asking: Asking) -> Callable[[Random], Exercise]:
    def draw(random: Random) -> Exercise:
        scene = random_scene(random)
        question = asking(random, scene)
        return Exercise(f"{IMAGE}\n{question.text}", question.answer, (scene,))

    return draw


def one_of_two(random: Random) -> Exercise:
    """The figures of the first, or of the second, of two pictures."""
    scenes = (random_scene(random), random_scene(random))
    asked = random.randrange(2)
    answer = describe(random, scenes[asked]).answer
    return Exercise(f"{IMAGE}\n{IMAGE}\nWhat is in the {('first', 'second')[asked]} picture?", answer, scenes)


PICTURE_TASKS = (
    Task("describe", _about_one(describe), weight=12),
    Task("count shapes", _about_one(count_all), weight=3),
    Task("count one shape", _about_one(count_shape), weight=5),
    Task("color of shape", _about_one(color_of_shape), weight=5),
    Task("shape of color", _about_one(shape_of_color), weight=5),
    Task("is there", _about_one(is_there), weight=5),
    Task("one of two pictures", one_of_two, weight=5),
)
