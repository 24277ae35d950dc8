"""/v1/models: the models that are served, and their adapters."""

import json
from typing import Any

from baton.inference.v1 import generate_pb2, lora_pb2
from router.openai.call import HttpCall
from router.openai.choices import now
from router.text.served_model import ServedModel
from router.workers.cluster import Cluster
from router.workers.loras import loras_of_model, named

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
