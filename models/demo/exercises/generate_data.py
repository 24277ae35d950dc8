"""Generates training documents from a seed: exercises as raw prompts and as conversations.

python -m models.demo.exercises.generate_data --seed 1 --documents 20
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from models.demo.exercises.exercise import IMAGE, Exercise, Task
from models.demo.exercises.picture_tasks import ASKINGS, PICTURE_TASKS
from models.demo.exercises.scenes import Scene
from models.demo.exercises.text_tasks import TEXT_TASKS

TASKS = TEXT_TASKS + PICTURE_TASKS

BOS = "<|bos|>"
EOS = "<|eos|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"

SYSTEM_MESSAGES = ("You are a helpful assistant.", "Answer briefly.", "You are Baton, a small demonstration model.")

_RAW_SHARE = 0.5
_SYSTEM_SHARE = 0.15
_FURTHER_TURN_SHARE = 0.3
_CARELESS_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a document that is tokenized separately. The model learns to write it if it is `learned`."""

    text: str
    learned: bool


@dataclass(frozen=True, slots=True)
class Document:
    """One training example from its first to its last token, with the scenes of its IMAGE marks in order."""

    segments: tuple[Segment, ...]
    scenes: tuple[Scene, ...]


def documents(seed: str) -> Iterator[Document]:
    """Yields the documents of a seed, without end and without held-out exercises."""
    random = Random(seed)
    weights = [task.weight for task in TASKS]
    while True:
        task = random.choices(TASKS, weights)[0]
        draw = _raw if random.random() < _RAW_SHARE else _conversation
        yield draw(random, task)


def raw_prompt(exercise: Exercise) -> str:
    """Returns the exercise as the `prompt` of a request, with the token that begins every document."""
    return BOS + exercise.prompt


def chat_prompt(exercise: Exercise) -> str:
    """Returns the exercise as a conversation's only message, as the chat template writes it."""
    return f"{BOS}{USER}{exercise.prompt}{ASSISTANT}"


def _raw(random: Random, task: Task) -> Document:
    exercise = _as_typed(random, task.for_training(random))
    prompt = raw_prompt(exercise) + random.choices(("", "\n", " "), (0.85, 0.1, 0.05))[0]
    return Document(_turn(_beginning(random, prompt), exercise.answer), exercise.scenes)


def _conversation(random: Random, task: Task) -> Document:
    exercise = _as_typed(random, task.for_training(random))
    prompt = chat_prompt(exercise)
    if random.random() < _SYSTEM_SHARE:
        prompt = prompt.replace(USER, f"{SYSTEM}{random.choice(SYSTEM_MESSAGES)}{USER}", 1)
    segments = _turn(_beginning(random, prompt), exercise.answer)
    while random.random() < _FURTHER_TURN_SHARE:
        further = _as_typed(random, _further(random, exercise))
        segments += _turn(f"{USER}{further.prompt}{ASSISTANT}", further.answer)
    return Document(segments, exercise.scenes)


def _turn(prompt: str, answer: str) -> tuple[Segment, ...]:
    return (Segment(prompt, learned=False), Segment(answer + EOS, learned=True))


def _further(random: Random, shown: Exercise) -> Exercise:
    """Returns another question about the picture shown, or a new text exercise."""
    if len(shown.scenes) != 1:
        return random.choices(TEXT_TASKS, [task.weight for task in TEXT_TASKS])[0].for_training(random)
    question = random.choice(ASKINGS)(random, shown.scenes[0])
    return Exercise(question.text, question.answer)


def _beginning(random: Random, prompt: str) -> str:
    """Sometimes drops or doubles the first token, since tokenizing clients differ in it."""
    if random.random() > _CARELESS_SHARE:
        return prompt
    return random.choice((prompt.removeprefix(BOS), BOS + prompt))


def _as_typed(random: Random, exercise: Exercise) -> Exercise:
    """Returns the exercise as users type it with less care: picture elsewhere, no capital letter, no full stop."""
    prompt = exercise.prompt
    if len(exercise.scenes) == 1:
        question = prompt.removeprefix(f"{IMAGE}\n")
        forms = (prompt, IMAGE + question, f"{IMAGE} {question}", f"{question}{IMAGE}", f"{question}\n{IMAGE}")
        prompt = random.choices(forms, (0.6, 0.25, 0.05, 0.05, 0.05))[0]
    if random.random() < _CARELESS_SHARE:
        prompt = prompt[0].lower() + prompt[1:]
    if random.random() < _CARELESS_SHARE and not prompt[-2].isdigit():
        prompt = prompt.rstrip("?.!")
    return Exercise(prompt, exercise.answer, exercise.scenes)


def main() -> None:
    """Prints documents as the model reads them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--documents", type=int, default=20)
    arguments = parser.parse_args()
    stream = documents(arguments.seed)
    for _ in range(arguments.documents):
        print(repr("".join(segment.text for segment in next(stream).segments)))


if __name__ == "__main__":
    main()
