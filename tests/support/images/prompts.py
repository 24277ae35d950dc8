"""Questions about pictures that the demonstration checkpoint can answer, and the plain library's answers to them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from random import Random

import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from models.demo.exercises.generate_data import chat_prompt, raw_prompt
from models.demo.exercises.picture_tasks import PICTURE_TASKS
from models.demo.exercises.scenes import draw, random_scene
from services.engines.base import EncodeEngine
from services.engines.prompt import Media, MediaSpan, Prompt


def png(image: Image.Image) -> bytes:
    """The picture as a file."""
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def scene_png(seed: int) -> bytes:
    """Some picture of shapes."""
    return png(draw(random_scene(Random(seed))))


@dataclass(frozen=True)
class Question:
    """A prompt of text and pictures, in that order of placeholders, with the right answer."""

    text: str
    pictures: tuple[Image.Image, ...]
    answer: str


def questions(count: int, seed: int = 1) -> list[Question]:
    """Held-out questions of every kind in turn, as raw prompts and as chats; each seventh has two pictures."""
    random = Random(seed)
    found = []
    for index in range(count):
        exercise = PICTURE_TASKS[index % len(PICTURE_TASKS)].for_evaluation(random)
        form = chat_prompt if index % 2 else raw_prompt
        found.append(Question(form(exercise), tuple(draw(scene) for scene in exercise.scenes), exercise.answer))
    return found


class PlainVision:
    """The reference: the checkpoint in transformers, float32, one prompt at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._model = LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()

    @cached_property
    def processor(self):
        return AutoProcessor.from_pretrained(self._path)

    def token_ids(self, question: Question) -> tuple[int, ...]:
        """The prompt, each picture's placeholder repeated as the library's own processor does."""
        return tuple(self._inputs(question).input_ids[0].tolist())

    def generate(self, question: Question, max_tokens: int) -> tuple[int, ...]:
        """Greedy ids after the prompt, the end included."""
        inputs = self._inputs(question)
        with torch.inference_mode():
            out = self._model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        return tuple(out[0, inputs.input_ids.shape[1] :].tolist())

    def text(self, ids: Sequence[int]) -> str:
        return self.processor.tokenizer.decode(ids, skip_special_tokens=True)

    def _inputs(self, question: Question):
        images = list(question.pictures)
        return self.processor(text=question.text, images=images, add_special_tokens=False, return_tensors="pt")


def spans_in(token_ids: Sequence[int], placeholder: int, tokens_per_image: int) -> list[MediaSpan]:
    """The places of the pictures, without their kind."""
    places = [index for index, token in enumerate(token_ids) if token == placeholder]
    return [MediaSpan(places[i], tokens_per_image, b"") for i in range(0, len(places), tokens_per_image)]


async def encoded_prompt(encoder: EncodeEngine, token_ids: tuple[int, ...], pictures: Sequence[Image.Image]) -> Prompt:
    """The prompt with the embeddings that the encoder makes of its pictures."""
    embeddings = await encoder.encode([Media(png(picture), "image/png") for picture in pictures])
    rules = encoder.facts.images
    spans = spans_in(token_ids, rules.placeholder_token_id, rules.tokens_per_image)
    media = [
        replace(span, digest=embedding.digest, embedding=embedding)
        for span, embedding in zip(spans, embeddings, strict=True)
    ]
    return Prompt(token_ids, media=tuple(media))
