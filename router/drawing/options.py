"""Checks of what a client wants drawn, by the model's rules, and the choice of what it leaves open."""

from dataclasses import dataclass

from baton.inference.v1 import image_pb2, model_pb2
from router.text.served_model import ServedModel
from router.workers.cluster import Cluster
from rpc.violations import Violations
from runtime.entropy import token_bytes

_SEED_BYTES = 6  # so that it fits every language's numbers
_MOST_GUIDANCE = 100


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


def check(request: image_pb2.ImageServiceGenerateRequest, target: DrawingModel) -> None:
    """Raises InvalidRequest naming every wrong field, and Unsupported for what the model cannot do."""
    violations, options, rules = Violations(), request.options, target.rules
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
