"""The share of held-out questions about pictures that a running cluster answers exactly.

    make up && .venv/bin/python benchmarks/image_accuracy.py [--pictures 200] [--at-once 16] [--address HOST:PORT]

Each question has a picture of its own (one task has two). Exit code 1 below 95 %.
"""

import argparse
import asyncio
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass
from io import BytesIO
from random import Random

from baton import AsyncClient
from baton.images import user_message
from baton.inference.v1 import generate_pb2
from cli.address import find_address
from models.demo.exercises.exercise import IMAGE, Exercise
from models.demo.exercises.picture_tasks import PICTURE_TASKS
from models.demo.exercises.scenes import draw

REQUIRED = 0.95
MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Result:
    """An answer, and whether it is correct."""

    task: str
    is_right: bool


def exercises(pictures: int, seed: int) -> list[tuple[str, Exercise]]:
    """Held-out exercises of all tasks in turn, until they have `pictures` pictures together."""
    random, found, shown = Random(seed), list[tuple[str, Exercise]](), 0
    while shown < pictures:
        task = PICTURE_TASKS[len(found) % len(PICTURE_TASKS)]
        found.append((task.name, task.for_evaluation(random)))
        shown += len(found[-1][1].scenes)
    return found


def request(exercise: Exercise) -> generate_pb2.GenerateRequest:
    """The exercise as a user's message, answered greedily."""
    text = exercise.prompt.replace(f"{IMAGE}\n", "")
    message = generate_pb2.GenerateRequest()
    message.chat.messages.append(user_message(text, [_file(exercise, index) for index in range(len(exercise.scenes))]))
    message.sampling.temperature = 0
    message.stopping.max_tokens = MAX_TOKENS
    return message


def _file(exercise: Exercise, index: int) -> bytes:
    file = BytesIO()
    draw(exercise.scenes[index]).save(file, "PNG")
    return file.getvalue()


async def ask(client: AsyncClient, task: str, exercise: Exercise, room: asyncio.Semaphore) -> Result:
    """Asks one question."""
    async with room, aclosing(client.generate(request(exercise), timeout_seconds=120)) as events:
        text = "".join([event.token.text async for event in events])
    return Result(task, text == exercise.answer)


async def measure(arguments: argparse.Namespace) -> list[Result]:
    """Asks all of them."""
    room = asyncio.Semaphore(arguments.at_once)
    async with AsyncClient(find_address(arguments.address).value) as client:
        asked = exercises(arguments.pictures, arguments.seed)
        return await asyncio.gather(*(ask(client, task, exercise, room) for task, exercise in asked))


def main() -> int:
    """Prints the share for each task and in total."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seed", type=int, default=2000)
    parser.add_argument("--address")
    results = asyncio.run(measure(parser.parse_args()))
    right, asked = Counter(each.task for each in results if each.is_right), Counter(each.task for each in results)
    for task, count in asked.items():
        print(f"{task:22} {right[task]:4} of {count:4}")
    share = right.total() / asked.total()
    print(f"{'all':22} {right.total():4} of {asked.total():4}  {share:.1%}")
    return 0 if share >= REQUIRED else 1


if __name__ == "__main__":
    raise SystemExit(main())
