"""Evaluates a checkpoint task by task: the share of greedy answers to held-out exercises that match exactly.

    python -m models.demo.evaluate models/demo --samples 200

The weights are used in float32, whatever dtype they are stored in. Every exercise is asked as a raw prompt and in a
chat.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration, LlavaProcessor

from models.demo.exercises.exercise import Exercise, Task
from models.demo.exercises.generate_data import EOS, TASKS, chat_prompt, raw_prompt
from models.demo.exercises.scenes import SIDE, draw
from models.demo.tokenizing import PAD

_ROWS = 250


@dataclass(frozen=True, slots=True)
class Score:
    """The shares of a task's exercises with an exact answer."""

    task: str
    raw: float
    chat: float


@dataclass(frozen=True, slots=True)
class Examiner:
    """A loaded checkpoint that answers exercises. `side` is the width of the pictures that it gets."""

    model: LlavaForConditionalGeneration
    processor: LlavaProcessor
    side: int = SIDE

    @classmethod
    def of_checkpoint(cls, folder: Path, device: str = "cpu", side: int = SIDE) -> "Examiner":
        """Loads a checkpoint in float32."""
        model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        model.train(mode=False).to(torch.device(device))
        return cls(model, AutoProcessor.from_pretrained(folder), side)  # type: ignore[no-untyped-call]

    def score(self, task: Task, seed: int, samples: int) -> Score:
        """Asks `samples` exercises of a task, and returns the score."""
        random = Random(f"{seed}/{task.name}")
        exercises = [task.for_evaluation(random) for _ in range(samples)]
        return Score(task.name, self._right(exercises, raw_prompt), self._right(exercises, chat_prompt))

    def answers(self, exercises: Sequence[Exercise], form: Callable[[Exercise], str]) -> Iterator[str]:
        """Returns the greedy answers, in order, including special tokens."""
        for start in range(0, len(exercises), _ROWS):
            yield from self._answers_at_once(exercises[start : start + _ROWS], form)

    def _right(self, exercises: Sequence[Exercise], form: Callable[[Exercise], str]) -> float:
        pairs = zip(self.answers(exercises, form), exercises, strict=True)
        return sum(answer == exercise.answer + EOS for answer, exercise in pairs) / len(exercises)

    def _answers_at_once(self, exercises: Sequence[Exercise], form: Callable[[Exercise], str]) -> list[str]:
        pictures = [draw(scene, self.side) for exercise in exercises for scene in exercise.scenes]
        inputs = self.processor(
            text=[form(exercise) for exercise in exercises],
            images=pictures or None,
            padding=True,
            add_special_tokens=False,
            return_tensors="pt",
        ).to(self.model.device)
        longest = max(len(self.processor.tokenizer(exercise.answer).input_ids) for exercise in exercises)
        with torch.inference_mode():
            generated = self.model.generate(**inputs, max_new_tokens=longest + 2, do_sample=False)  # type: ignore[misc]
        ids = generated[:, inputs.input_ids.shape[1] :]
        texts = self.processor.tokenizer.batch_decode(ids)
        return [text.replace(PAD, "") for text in texts]


def main() -> None:
    """Prints the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--side", type=int, default=SIDE, help="width of the pictures shown, in pixels")
    arguments = parser.parse_args()
    examiner = Examiner.of_checkpoint(arguments.checkpoint, arguments.device, arguments.side)
    print("| task | raw prompt | chat |\n|---|---|---|")
    for task in TASKS:
        score = examiner.score(task, arguments.seed, arguments.samples)
        print(f"| {score.task} | {score.raw:.1%} | {score.chat:.1%} |", flush=True)


if __name__ == "__main__":
    main()
