"""The inputs of a request for embeddings: checks, and from texts to token ids. Nothing is cut."""

from dataclasses import dataclass

from baton.inference.v1 import embed_pb2, generate_pb2, model_pb2
from router.text.request_input import unsupported
from router.text.served_model import ServedModel
from router.workers.cluster import Cluster
from rpc.violations import Violations


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """A model, and the vectors that its workers make."""

    model: ServedModel
    rules: model_pb2.EmbeddingRules


def find_model(cluster: Cluster, name: str) -> EmbeddingModel:
    """The model of this name. Raises ModelNotFound, NoWorker, or Unsupported if no worker has an embedder."""
    model = cluster.model(name)
    for worker in cluster.workers:
        if worker.record.model == model.name and worker.model is not None and worker.model.embedding is not None:
            return EmbeddingModel(worker.model, worker.model.embedding)
    raise unsupported("embeddings, since no worker has the role embed", model)


def check(request: embed_pb2.EmbedRequest, target: EmbeddingModel, max_inputs: int) -> None:
    """Raises InvalidRequest naming every wrong field, before any text is tokenized."""
    violations = Violations()
    violations.request_id(request.request_id)
    violations.require(bool(request.inputs), "inputs", "is empty")
    if request.HasField("dimensions"):
        violations.number("dimensions", request.dimensions, 1, target.rules.dimensions)
    if violations.count("inputs", len(request.inputs), max_inputs):
        for index, one in enumerate(request.inputs):
            _check_input(f"inputs[{index}]", one, target, violations)
            if violations.is_full:
                break
    violations.raise_any()


def tokenize(request: embed_pb2.EmbedRequest, target: EmbeddingModel) -> list[generate_pb2.TokenIds]:
    """The ids of a checked request's inputs. Slow for long texts. Raises InvalidRequest naming what is too long."""
    violations = Violations()
    found = [_ids(one, target.model) for one in request.inputs]
    for index, ids in enumerate(found):
        violations.require(bool(ids.ids), f"inputs[{index}]", "has no tokens")
        _check_length(f"inputs[{index}]", len(ids.ids), target, violations)
    violations.raise_any()
    return found


def _check_input(path: str, one: embed_pb2.EmbedInput, target: EmbeddingModel, violations: Violations) -> None:
    match one.WhichOneof("input"):
        case "text":
            _check_text(path, one.text, target, violations)
        case "token_ids":
            ids = one.token_ids.ids
            violations.require(bool(ids), path, "is empty")
            if _check_length(path, len(ids), target, violations):
                violations.token_ids(f"{path}.token_ids.ids", ids, target.model.limits.vocab_size)
        case _:
            violations.add(path, "is missing; give one of text, token_ids")


def _check_text(path: str, text: str, target: EmbeddingModel, violations: Violations) -> None:
    if target.model.tokenizer is None:
        raise unsupported(f"{path}.text", target.model)
    violations.require(bool(text), path, "is empty")
    most = target.rules.max_input_tokens * target.model.tokenizer.longest_token
    violations.require(
        len(text) <= most,
        path,
        f"has {len(text)} characters; {target.rules.max_input_tokens} tokens never have so many",
    )


def _check_length(path: str, tokens: int, target: EmbeddingModel, violations: Violations) -> bool:
    most = target.rules.max_input_tokens
    violations.require(tokens <= most, path, f"has {tokens} tokens of at most {most}")
    return tokens <= most


def _ids(one: embed_pb2.EmbedInput, model: ServedModel) -> generate_pb2.TokenIds:
    if one.HasField("token_ids"):
        return one.token_ids
    assert model.tokenizer is not None
    return generate_pb2.TokenIds(ids=model.tokenizer.encode(one.text))
