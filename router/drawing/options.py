"""Checks of what a client wants drawn, by the model's rules, and the choice of what it leaves open."""

from dataclasses import dataclass

from baton.inference.v1 import image_pb2, model_pb2, video_pb2
from router.text.served_model import ServedModel
from router.workers.cluster import Cluster
from rpc.violations import Violations
from runtime.entropy import token_bytes

_SEED_BYTES = 6  # so that it fits every language's numbers
_MOST_GUIDANCE = 100
_SLOWEST, _FASTEST = 0.1, 240  # frames per second


@dataclass(frozen=True, slots=True)
class DrawingModel:
    """A model that draws, and its rules."""

    model: ServedModel
    rules: model_pb2.ImageGeneration


def find_model(cluster: Cluster, name: str) -> DrawingModel:
    """The model of this name, or the only one that draws. Raises ModelNotFound, NoWorker, InvalidRequest, or
    Unsupported if it draws nothing.
    """
    drawing = {
        worker.record.model: DrawingModel(worker.model, worker.model.drawing)
        for worker in cluster.workers
        if worker.model is not None and worker.model.drawing is not None
    }
    model = cluster.model(name, [one for one in cluster.models if one.name in drawing])
    if model.name in drawing:
        return drawing[model.name]
    raise model.unsupported("pictures, since no worker has the role diffuse")


Request = image_pb2.ImageServiceGenerateRequest | video_pb2.VideoServiceGenerateRequest


def check(request: Request, target: DrawingModel) -> None:
    """Raises InvalidRequest naming every wrong field, and Unsupported for what the model cannot do."""
    violations, options, rules = Violations(), request.options, target.rules
    if isinstance(request, video_pb2.VideoServiceGenerateRequest):
        if not rules.HasField("video"):
            raise target.model.unsupported("clips")
        _check_clip(request, rules, violations)
    violations.request_id(request.request_id)
    violations.require(bool(options.prompt), "options.prompt", "is empty")
    for name in ("prompt", "negative_prompt"):
        characters, most = len(getattr(options, name)), rules.max_prompt_characters
        violations.require(characters <= most, f"options.{name}", f"has {characters} characters of at most {most}")
    _check_size(options, rules, violations)
    if options.HasField("steps"):
        violations.number("options.steps", options.steps, 1, rules.max_steps)
    if options.HasField("guidance_scale"):
        violations.number("options.guidance_scale", options.guidance_scale, 0, _MOST_GUIDANCE)
    if options.HasField("number"):
        violations.number("options.number", options.number, 1, rules.max_number)
    violations.raise_any()
    if options.negative_prompt and not rules.negative_prompt:
        raise target.model.unsupported("options.negative_prompt")
    if options.preview_steps and not rules.previews:
        raise target.model.unsupported("options.preview_steps")


def _check_clip(
    request: video_pb2.VideoServiceGenerateRequest, rules: model_pb2.ImageGeneration, violations: Violations
) -> None:
    video, options, limits = request.video, request.options, rules.video
    frames = video.frames if video.HasField("frames") else limits.frames
    violations.number("video.frames", frames, 1, limits.max_frames)
    multiple = limits.frame_multiple or 1
    is_possible = (frames - 1) % multiple == 0
    violations.require(is_possible, "video.frames", f"must be 1 more than a multiple of {multiple}, is {frames}")
    if video.HasField("frames_per_second"):
        violations.number("video.frames_per_second", video.frames_per_second, _SLOWEST, _FASTEST)
    if video.format not in video_pb2.VideoFormat.values():
        violations.add("video.format", f"unknown format {video.format}")
    elif video.format == video_pb2.VIDEO_FORMAT_MP4:
        violations.require(limits.mp4, "video.format", "MP4 cannot be written by the model's workers; PNG can")
        is_even = (options.width or rules.width) % 2 == (options.height or rules.height) % 2 == 0
        violations.require(is_even, "video.format", "MP4 needs an even width and height")


def _check_size(options: image_pb2.ImageOptions, rules: model_pb2.ImageGeneration, violations: Violations) -> None:
    for name in ("width", "height"):
        if options.HasField(name):
            size, multiple = getattr(options, name), rules.size_multiple or 1
            is_multiple = size > 0 and size % multiple == 0
            violations.require(is_multiple, f"options.{name}", f"must be a multiple of {multiple}, is {size}")
    width = options.width if options.HasField("width") else rules.width
    height = options.height if options.HasField("height") else rules.height
    larger = "width" if (options.HasField("width") and width >= height) or not options.HasField("height") else "height"
    violations.require(
        width * height <= rules.max_pixels,
        f"options.{larger}",
        f"{width} x {height} are {width * height} pixels of at most {rules.max_pixels}",
    )


def seeds(options: image_pb2.ImageOptions) -> list[int]:
    """The seed of each picture: the same on every worker that draws it."""
    first = options.seed if options.HasField("seed") else int.from_bytes(token_bytes(_SEED_BYTES), "little")
    number = options.number if options.HasField("number") else 1
    return [(first + index) % 2**64 for index in range(number)]
