"""Checks of what a client wants drawn, by the model's rules, and the choice of what it leaves open."""

from dataclasses import dataclass

from baton.inference.v1 import image_pb2, model_pb2, video_pb2
from engine_protocol.request_rules import check_clip, check_options
from router.text.served_model import ServedModel
from router.workers.cluster import Cluster
from rpc.violations import Violations
from runtime.entropy import token_bytes

_SEED_BYTES = 6  # so that it fits every language's numbers


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
        check_clip(request.video, options, rules, violations)
    violations.request_id(request.request_id)
    check_options(options, rules, violations)
    if options.HasField("number"):
        violations.number("options.number", options.number, 1, rules.max_number)
    violations.raise_any()
    if options.negative_prompt and not rules.negative_prompt:
        raise target.model.unsupported("options.negative_prompt")
    if options.preview_steps and not rules.previews:
        raise target.model.unsupported("options.preview_steps")


def seeds(options: image_pb2.ImageOptions) -> list[int]:
    """The seed of each picture: the same on every worker that draws it."""
    first = options.seed if options.HasField("seed") else int.from_bytes(token_bytes(_SEED_BYTES), "little")
    number = options.number if options.HasField("number") else 1
    return [(first + index) % 2**64 for index in range(number)]
