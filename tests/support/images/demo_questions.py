"""Questions about generated pictures, with the demonstration model's right answers, as clients send them."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from random import Random

from PIL import Image

from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import media_pb2
from models.demo.exercises.exercise import IMAGE, Exercise
from models.demo.exercises.picture_tasks import PICTURE_TASKS
from models.demo.exercises.scenes import draw

MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt about pictures, and the right answer."""

    exercise: Exercise
    pictures: tuple[Image.Image, ...]

    @property
    def files(self) -> list[bytes]:
        return [png(picture) for picture in self.pictures]


def questions(count: int, seed: str) -> list[Question]:
    """Held-out questions of all picture tasks in turn; one task is about two pictures."""
    random = Random(seed)
    exercises = [PICTURE_TASKS[index % len(PICTURE_TASKS)].for_evaluation(random) for index in range(count)]
    return [Question(each, tuple(draw(scene) for scene in each.scenes)) for each in exercises]


def png(picture: Image.Image) -> bytes:
    """The picture as a file."""
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def as_prompt(question: Question) -> pb.GenerateRequest:
    """A raw prompt with placeholders, and media beside it."""
    request = _greedy()
    request.prompt = question.exercise.prompt
    request.media.extend(media_pb2.MediaItem(data=file) for file in question.files)
    return request


def as_chat(question: Question) -> pb.GenerateRequest:
    """A user's message of parts: the pictures, and then the text."""
    return chat(question.exercise.prompt.replace(f"{IMAGE}\n", ""), question.files)


def chat(text: str, files: Sequence[bytes]) -> pb.GenerateRequest:
    """A user's message about picture files."""
    parts = [pb.ContentPart(media=media_pb2.MediaItem(data=file)) for file in files]
    request = _greedy()
    request.chat.messages.append(pb.ChatMessage(role="user", parts=[*parts, pb.ContentPart(text=text)]))
    return request


def _greedy() -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    request.sampling.temperature = 0
    request.stopping.max_tokens = MAX_TOKENS
    return request
