"""`/v1/images/generations`: the body, the response, and the events of a stream with partial images."""

import asyncio
import base64
import json
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from baton.errors import BatonError
from baton.inference.v1 import image_pb2
from router.drawing.calls import Event
from router.drawing.pipeline import Finished
from router.openai.call import HttpCall
from router.openai.choices import EVENTS, event, now
from router.openai.errors import UnsupportedField, describe
from router.openai.fields import Fields, Number, Uint32

# The place of a picture in JSON, in which clients have no strings, and what it begins with: a URL is a data: URL.
_PLACES = {b'"b64_json": ""': b'"b64_json": "', b'"url": ""': b'"url": "data:image/png;base64,'}
_PLACE = re.compile(b"|".join(_PLACES))
_PIECE = 96 * 1024  # of a picture; a multiple of 3, so that its pieces in base64 are those of the whole
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})")


class ImagesRequest(Fields):
    """The body. From `negative_prompt` on, the fields are those that OpenAI's API does not have."""

    model: str = Field(default="", max_length=1024)
    prompt: str
    n: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    size: Annotated[str, Field(pattern=r"^(auto|[0-9]{1,5}x[0-9]{1,5})$")] = "auto"
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    quality: Literal["auto"] = "auto"
    background: Literal["auto", "opaque"] = "auto"
    moderation: Literal["auto", "low"] = "auto"
    stream: bool = False
    partial_images: Annotated[int, Field(ge=0, le=3)] = 0
    user: str | None = None
    negative_prompt: str = ""
    guidance_scale: Number | None = None
    steps: Uint32 | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None

    def image_request(self, request_id: str) -> image_pb2.ImageServiceGenerateRequest:
        """The request to the pipeline. Raises UnsupportedField."""
        if self.stream and self.response_format != "b64_json":
            raise UnsupportedField("response_format", "a stream has its pictures as b64_json alone")
        if self.output_format != "png":
            raise UnsupportedField("output_format", "pictures are PNGs")
        made = image_pb2.ImageServiceGenerateRequest(request_id=request_id, model=self.model)
        made.options.prompt, made.options.negative_prompt = self.prompt, self.negative_prompt
        wanted = {"number": self.n, "guidance_scale": self.guidance_scale, "steps": self.steps, "seed": self.seed}
        for name, value in wanted.items():
            if value is not None:
                setattr(made.options, name, value)
        if size := _SIZE.fullmatch(self.size):
            made.options.width, made.options.height = int(size[1]), int(size[2])
        return made


class ImageCollector:
    """The whole response, once the pipeline has ended."""

    def __init__(self, response_format: str) -> None:
        self._images: dict[int, image_pb2.GeneratedImage] = {}
        self._empty = {"url": ""} if response_format == "url" else {"b64_json": ""}

    async def send(self, event: Event | Finished) -> None:
        """Takes the next event of the pipeline."""
        if isinstance(event, image_pb2.GeneratedImage):
            self._images[event.index] = event

    def whole(self) -> bytes:
        """The body. Slow for large pictures: call it in a thread."""
        images = [self._images[index] for index in sorted(self._images)]
        data = [{**self._empty, "seed": image.seed} for image in images]
        about = {"size": f"{images[0].width}x{images[0].height}", "output_format": "png"}
        made = json.dumps({"created": now(), "data": data, **about}).encode()
        return _with_pictures(made, [image.data for image in images])


class ImageStream:
    """Writes a request's pictures as OpenAI's events, with at most `partial_images` previews of each."""

    def __init__(self, call: HttpCall, partial_images: int) -> None:
        self._call = call
        self._most = partial_images
        self._partial: dict[int, int] = {}  # how many were sent, by the picture

    async def send(self, happened: Event | Finished) -> None:
        """Takes the next event of the pipeline."""
        match happened:
            case image_pb2.ImageProgress() if happened.preview:
                number = self._partial.get(happened.index, 0)
                if number < self._most:
                    self._partial[happened.index] = number + 1
                    await self._write("partial_image", happened.preview, {"partial_image_index": number})
            case image_pb2.GeneratedImage():
                size = f"{happened.width}x{happened.height}"
                await self._write("completed", happened.data, {"size": size, "seed": happened.seed})
            case image_pb2.ImagesFinished():
                await self._call.end()

    async def fail(self, error: BatonError) -> None:
        """Ends the stream with an event that OpenAI's clients raise as an error."""
        await self._call.end(event({"type": "error", "error": describe(error)}, "error"))

    async def _write(self, name: str, png: bytes, about: dict[str, object]) -> None:
        if not self._call.response_status:
            await self._call.begin(200, EVENTS)
        kind = f"image_generation.{name}"
        made = {"type": kind, "b64_json": "", "created_at": now(), "output_format": "png", **about}
        await self._call.write(await asyncio.to_thread(_with_pictures, event(made, kind), [png]))


def preview_steps(steps: int, partial_images: int) -> int:
    """The steps between previews, so that so many come before the picture; 0 for none."""
    return max(1, steps // (partial_images + 1)) if partial_images else 0


def _with_pictures(made: bytes, pngs: Sequence[bytes]) -> bytes:
    """JSON with the pictures in their places. In pieces, between which other threads run."""
    parts, done = list[bytes](), 0
    for place, png in zip(_PLACE.finditer(made), pngs, strict=True):
        encoded = [base64.b64encode(png[at : at + _PIECE]) for at in range(0, len(png), _PIECE)]
        parts += [made[done : place.start()], _PLACES[place[0]], *encoded, b'"']
        done = place.end()
    return b"".join([*parts, made[done:]])
