"""The questions of lm-eval's tasks: held-out exercises of the families that have one short answer."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import datasets

from models.demo.exercises.exercise import Exercise, Task
from models.demo.exercises.text_tasks import TEXT_TASKS

FAMILIES = tuple(
    task for task in TEXT_TASKS if task.name in ("repeat", "reverse", "sort", "add", "count", "calendar", "lookup")
)
_CHOICES = 4
_SEED = 7


@dataclass(frozen=True, slots=True)
class _Question:
    exercise: Exercise
    family: Task
    random: Random


def answers(samples: int = 210, **_: object) -> dict[str, datasets.Dataset]:
    """Questions with their answers, equally many of each family. `samples` comes from --metadata."""
    rows = [{"question": each.exercise.prompt, "answer": each.exercise.answer} for each in _questions(samples)]
    return {"test": datasets.Dataset.from_list(rows)}


def choices(samples: int = 210, **_: object) -> dict[str, datasets.Dataset]:
    """The same questions, each with its answer among those of three others of its family."""
    return {"test": datasets.Dataset.from_list([_with_choices(each) for each in _questions(samples)])}


def _questions(samples: int) -> Iterator[_Question]:
    sources = {family.name: Random(f"{_SEED}/{family.name}") for family in FAMILIES}
    for number in range(samples):
        family = FAMILIES[number % len(FAMILIES)]
        yield _Question(family.for_evaluation(sources[family.name]), family, Random(f"{_SEED}/{number}"))


def _with_choices(question: _Question) -> dict[str, Any]:
    found = [question.exercise.answer]
    while len(found) < _CHOICES:
        other = question.family.draw(question.random).answer
        if other not in found:
            found.append(other)
    question.random.shuffle(found)
    right = found.index(question.exercise.answer)
    return {"question": question.exercise.prompt, "choices": found, "right": right}
