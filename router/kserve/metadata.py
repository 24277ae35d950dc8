"""A model's inputs and outputs, for clients that ask before they send."""

from baton.inference.v1 import model_pb2
from baton.kserve import inference_pb2 as pb
from router.kserve.tensors import EMBEDDING, OUTPUTS, VERSION

PLATFORM = "baton"

_TYPES = {"BYTES": pb.TYPE_STRING, "BOOL": pb.TYPE_BOOL, "FP32": pb.TYPE_FP32}


def metadata(model: model_pb2.Model) -> pb.ModelMetadataResponse:
    """Inputs and outputs, with their types and shapes; -1 is any number."""
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[tensor(name=name, datatype=kind, shape=shape) for name, kind, shape in _inputs(model)],
        outputs=[tensor(name=name, datatype=kind, shape=shape) for name, kind, shape in _outputs(model)],
    )


def config(model: model_pb2.Model) -> pb.ModelConfig:
    """The same as Triton's configuration. A model that generates is decoupled: it may answer by several messages."""
    return pb.ModelConfig(
        name=model.name,
        platform=PLATFORM,
        backend=PLATFORM,
        input=[
            pb.ModelInput(name=name, data_type=_TYPES[kind], dims=shape, optional=name != "text_input")
            for name, kind, shape in _inputs(model)
        ],
        output=[pb.ModelOutput(name=name, data_type=_TYPES[kind], dims=shape) for name, kind, shape in _outputs(model)],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=not model.capabilities.embeddings_only),
    )


def _inputs(model: model_pb2.Model) -> list[tuple[str, str, list[int]]]:
    texts = [-1] if model.HasField("embedding") else [1]
    prompt = ("text_input", "BYTES", texts)
    if model.capabilities.embeddings_only:
        return [prompt]
    return [prompt, ("stream", "BOOL", [1]), ("sampling_parameters", "BYTES", [1])]


def _outputs(model: model_pb2.Model) -> list[tuple[str, str, list[int]]]:
    found: list[tuple[str, str, list[int]]] = []
    if not model.capabilities.embeddings_only:
        found += [(name, "BYTES", [-1]) for name in OUTPUTS]
    if model.HasField("embedding"):
        found.append((EMBEDDING, "FP32", [-1, model.embedding.dimensions]))
    return found
