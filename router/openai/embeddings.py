"""`/v1/embeddings`: the body, and the response with vectors as lists of numbers or as base64 of packed floats.

/v1/models: the models that are served, and their adapters.
"""

import base64
import json
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.inference.v1 import embed_pb2, generate_pb2, lora_pb2
from router.openai.call import HttpCall
from router.openai.choices import now
from router.openai.fields import Fields, Uint32
from router.text.served_model import ServedModel
from router.workers.cluster import Cluster
from router.workers.loras import loras_of_model, named

_SLICE = 512  # numbers that are written while the interpreter is held


class EmbeddingsRequest(Fields):
    """The body. `normalize` is a field that OpenAI's API does not have, as in vLLM."""

    model: str = Field(default="", max_length=1024)
    input: str | list[str] | list[Uint32] | list[list[Uint32]]
    dimensions: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None
    normalize: bool | None = None

    def embed_request(self, request_id: str) -> embed_pb2.EmbedRequest:
        """The request to the pipeline."""
        made = embed_pb2.EmbedRequest(request_id=request_id, model=self.model)
        for one in self._inputs():
            if isinstance(one, str):
                made.inputs.add(text=one)
            else:
                made.inputs.add().token_ids.ids.extend(one)
        if self.dimensions is not None:
            made.dimensions = self.dimensions
        if self.normalize is not None:
            made.normalize = self.normalize
        return made

    def _inputs(self) -> Iterator[str | list[int]]:
        if isinstance(self.input, str):
            yield self.input
            return
        whole = [one for one in self.input if isinstance(one, int)]
        if whole:
            yield whole
            return
        yield from (one for one in self.input if not isinstance(one, int))


def whole(response: embed_pb2.EmbedResponse, encoding: str) -> bytes:
    """The response. Slow for many long vectors: call it in a thread."""
    vectors = _base64(response.embeddings) if encoding == "base64" else _numbers(response.embeddings)
    items = [f'{{"object":"embedding","index":{index},"embedding":{vector}}}' for index, vector in enumerate(vectors)]
    tokens = response.usage.prompt_tokens
    model, usage = json.dumps(response.model), {"prompt_tokens": tokens, "total_tokens": tokens}
    return f'{{"object":"list","data":[{",".join(items)}],"model":{model},"usage":{json.dumps(usage)}}}'.encode()


def _base64(embeddings: Sequence[embed_pb2.TextEmbedding]) -> Iterator[str]:
    for one in embeddings:
        yield f'"{base64.b64encode(array("f", one.values).tobytes()).decode()}"'


def _numbers(embeddings: Sequence[embed_pb2.TextEmbedding]) -> Iterator[str]:
    for one in embeddings:
        values = one.values[:]
        pieces = (json.dumps(values[at : at + _SLICE])[1:-1] for at in range(0, len(values), _SLICE))
        yield f"[{','.join(pieces)}]"


_MODELS = "/v1/models/"


class ModelEndpoints:
    """Describes the models of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._created = now()

    async def all(self, call: HttpCall, _path: str) -> None:
        """All of them, each with its adapters after it. Raises RouterStarting."""
        self._cluster.require_registry()
        models: list[dict[str, Any]] = []
        for model in self._cluster.models:
            models.append(self._described(model))
            adapters = loras_of_model(self._cluster.workers, model.name).values()
            models += [self._described(model, adapter) for adapter in adapters]
        await call.respond(200, json.dumps({"object": "list", "data": models}).encode())

    async def one(self, call: HttpCall, path: str) -> None:
        """The one of the path. Raises ModelNotFound."""
        name = path.removeprefix(_MODELS)
        model = self._cluster.model(name)
        adapter = self._cluster.lora(generate_pb2.GenerateRequest(model=name), model)
        await call.respond(200, json.dumps(self._described(model, adapter)).encode())

    def _described(self, model: ServedModel, adapter: lora_pb2.LoraAdapter | None = None) -> dict[str, Any]:
        context = model.limits.max_context_tokens
        return {
            "id": named(model.name, adapter),
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": context,
            "parent": model.name if adapter else None,
        }
