"""The rules for sampling parameters, pictures and clips. Routers check requests first, workers again."""

from baton.inference.v1 import image_pb2, model_pb2, sampling_pb2, video_pb2
from baton.sampling_options import OPTIONS, given
from rpc.violations import Violations

MAX_BIAS = 100.0
_MOST_GUIDANCE = 100
_SLOWEST, _FASTEST = 0.1, 240  # frames per second


def check_params(path: str, params: sampling_pb2.SamplingParams, violations: Violations) -> None:
    """Notes each parameter that is set and out of range, below `path`. The length of logit_bias must be bounded."""
    for name, value in given(params).items():
        if problem := OPTIONS[name].problem(value):
            violations.add(f"{path}.{name}", problem)
    for token_id, bias in params.logit_bias.items():
        if not abs(bias) <= MAX_BIAS:
            violations.number(f"{path}.logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)
            if violations.is_full:
                return


def check_bias_ids(path: str, params: sampling_pb2.SamplingParams, vocab_size: int, violations: Violations) -> None:
    """Notes each token of logit_bias that the vocabulary does not have, below `path`."""
    for token_id in params.logit_bias:
        if token_id >= vocab_size:
            violations.add(f"{path}.logit_bias[{token_id}]", f"the vocabulary ends at {vocab_size - 1}")
            if violations.is_full:
                return


def check_options(options: image_pb2.ImageOptions, rules: model_pb2.ImageGeneration, violations: Violations) -> None:
    """Notes each wrong field of `options` but the number, which is that of the seeds for a worker."""
    violations.require(bool(options.prompt), "options.prompt", "is empty")
    for name in ("prompt", "negative_prompt"):
        characters, most = len(getattr(options, name)), rules.max_prompt_characters
        violations.require(characters <= most, f"options.{name}", f"has {characters} characters of at most {most}")
    _check_size(options, rules, violations)
    if options.HasField("steps"):
        violations.number("options.steps", options.steps, 1, rules.max_steps)
    if options.HasField("guidance_scale"):
        violations.number("options.guidance_scale", options.guidance_scale, 0, _MOST_GUIDANCE)


def check_clip(
    video: video_pb2.VideoOptions,
    options: image_pb2.ImageOptions,
    rules: model_pb2.ImageGeneration,
    violations: Violations,
) -> None:
    """Notes each wrong field of `video`, for a model that draws clips."""
    limits = rules.video
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
