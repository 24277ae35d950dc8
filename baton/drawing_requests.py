"""The arguments of both clients' methods that draw, and the requests that these make."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.connection.settings import CALL_SECONDS
from baton.inference.v1 import image_pb2, video_pb2
from baton.requests import set_field

Request = TypeVar("Request")


@dataclass(frozen=True, slots=True)
class DrawCall(Generic[Request]):
    """A request for pictures or clips, its priority, and how long it may take."""

    request: Request
    priority: int
    timeout_seconds: float | None


def draw(
    prompt: str,
    *,
    model: str = "",
    negative_prompt: str = "",
    guidance_scale: float | None = None,
    width: int | None = None,
    height: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    number: int | None = None,
    preview_steps: int = 0,
    request_id: str = "",
    priority: int = 0,
    timeout_seconds: float | None = CALL_SECONDS,
) -> DrawCall[image_pb2.ImageServiceGenerateRequest]:
    """Draws pictures. Returns an iterator of their events: `progress` by step, each `image`, then `finished`.

    Args:
        prompt: What is drawn.
        model: Needed where several models draw.
        negative_prompt: What is not to be in the picture.
        guidance_scale: How closely a picture follows the prompt. This and what follows: by default as the model says.
        width: In pixels.
        height: In pixels.
        steps: More take longer.
        seed: The same seed gives the same picture again; by default another one each time.
        number: How many pictures, each from a seed of its own: the first from `seed`, the next from the next.
        preview_steps: Sends a preview each time that so many steps are done; 0 sends none.
        request_id: Identifies the request in cancels and logs.
        priority: From -10 to 10; where requests wait, higher ones go first.
        timeout_seconds: For the whole call.
    """
    wanted = {"width": width, "height": height, "steps": steps, "seed": seed, "number": number}
    more = {"guidance_scale": guidance_scale, "preview_steps": preview_steps}
    options = _options(prompt, negative_prompt, {**wanted, **more})
    message = image_pb2.ImageServiceGenerateRequest(request_id=request_id, model=model, options=options)
    return DrawCall(message, priority, timeout_seconds)


def draw_video(
    prompt: str,
    *,
    frames: int | None = None,
    frames_per_second: float | None = None,
    mp4: bool = False,
    model: str = "",
    negative_prompt: str = "",
    guidance_scale: float | None = None,
    width: int | None = None,
    height: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    number: int | None = None,
    preview_steps: int = 0,
    request_id: str = "",
    priority: int = 0,
    timeout_seconds: float | None = CALL_SECONDS,
) -> DrawCall[video_pb2.VideoServiceGenerateRequest]:
    """Draws clips. Returns an iterator of events: `progress` by step, each `frame`, each `video`, then `finished`.

    Args:
        prompt: What is drawn.
        frames: How many pictures a clip has. This and the next: by default as the model says.
        frames_per_second: How fast it is played.
        mp4: One file in `video.data` for each clip; otherwise each `frame` is a PNG.
        model: Needed where several models draw.
        negative_prompt: What is not to be in the clip.
        guidance_scale: How closely a clip follows the prompt. This and what follows: by default as the model says.
        width: In pixels.
        height: In pixels.
        steps: More take longer.
        seed: The same seed gives the same clip again; by default another one each time.
        number: How many clips, each from a seed of its own: the first from `seed`, the next from the next.
        preview_steps: Sends a preview of the first frame each time that so many steps are done; 0 sends none.
        request_id: Identifies the request in cancels and logs.
        priority: From -10 to 10; where requests wait, higher ones go first.
        timeout_seconds: For the whole call.
    """
    wanted = {"width": width, "height": height, "steps": steps, "seed": seed, "number": number}
    more = {"guidance_scale": guidance_scale, "preview_steps": preview_steps}
    options = _options(prompt, negative_prompt, {**wanted, **more})
    message = video_pb2.VideoServiceGenerateRequest(request_id=request_id, model=model, options=options)
    message.video.format = video_pb2.VIDEO_FORMAT_MP4 if mp4 else video_pb2.VIDEO_FORMAT_PNG
    set_field(message.video, "frames", frames, "video")
    set_field(message.video, "frames_per_second", frames_per_second, "video")
    return DrawCall(message, priority, timeout_seconds)


def _options(prompt: str, negative_prompt: str, values: Mapping[str, float | None]) -> image_pb2.ImageOptions:
    """The options of a drawing; what is None is left to the model. Raises as set_field does."""
    options = image_pb2.ImageOptions(prompt=prompt, negative_prompt=negative_prompt)
    for name, value in values.items():
        set_field(options, name, value, "options")
    return options
