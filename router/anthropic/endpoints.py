"""The endpoints of Anthropic's API: messages, their count of tokens, and the models in its form."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2, lora_pb2
from router.anthropic.answers import MessageHead, MessageStream, whole
from router.anthropic.errors import ANTHROPIC, MESSAGES
from router.anthropic.messages import CountTokensRequest, MessagesRequest
from router.openai.call import HttpCall
from router.openai.choices import now
from router.openai.exchange import MODEL_PATH, MODELS_PATH, Handler, HttpExchange
from router.request_path import RequestPath
from router.stream.collector import UnaryCollector
from router.text import request_input
from router.text.served_model import ServedModel
from router.workers.loras import loras_of_model, named

_MOST_MODELS, _MODELS = 1000, 20  # of a page; as many without `limit`


class MessagesEndpoints:
    """The handlers. What surrounds them is that of OpenAI's API."""

    api = ANTHROPIC

    def __init__(self, path: RequestPath, exchange: HttpExchange) -> None:
        self._path = path
        self._exchange = exchange
        self._created = datetime.fromtimestamp(now(), timezone.utc).isoformat()
        self.handlers: Mapping[str, Mapping[str, Handler]] = {
            MESSAGES: {"POST": self._create},
            f"{MESSAGES}/count_tokens": {"POST": self._count_tokens},
            MODELS_PATH: {"GET": self._models},
            MODEL_PATH: {"GET": self._model},
        }

    async def _create(self, call: HttpCall, _path: str) -> None:
        body, asked = await self._exchange.read(call, MessagesRequest, MessagesRequest.asked)
        call.places = asked.places
        head = MessageHead(f"msg_{call.request_id}", asked.request)
        if body.stream:
            await self._exchange.run(call, asked.request, MessageStream(call, head))
            return
        collector = UnaryCollector()
        await self._exchange.run(call, asked.request, collector)
        await call.respond(200, json.dumps(whole(head, collector)).encode())

    async def _count_tokens(self, call: HttpCall, _path: str) -> None:
        """The number of tokens that the prompt would have; those of an image are counted if all images have as many."""
        _, counted = await self._exchange.read(call, CountTokensRequest, CountTokensRequest.counted)
        call.places = counted.places
        account = self._path.contexts.read_qos(call).account
        ids = (await self._path.tokenization.tokenize(counted.request, account)).token_ids
        model = self._path.cluster.model(counted.prompt.model)
        count = request_input.expected_tokens(counted.prompt, ids, model)
        await call.respond(200, json.dumps({"input_tokens": count}).encode())

    async def _models(self, call: HttpCall, _path: str) -> None:
        found: list[dict[str, Any]] = []
        self._path.cluster.require_registry()
        for model in self._path.cluster.models:
            adapters = loras_of_model(self._path.cluster.workers, model.name)
            found += [self._described(model, adapter) for adapter in (None, *adapters.values())]
        await call.respond(200, json.dumps(_page(found, call.query)).encode())

    async def _model(self, call: HttpCall, path: str) -> None:
        name = path.removeprefix(f"{MODELS_PATH}/")
        model = self._path.cluster.model(name)
        adapter = self._path.cluster.lora(generate_pb2.GenerateRequest(model=name), model)
        await call.respond(200, json.dumps(self._described(model, adapter)).encode())

    def _described(self, model: ServedModel, adapter: lora_pb2.LoraAdapter | None) -> dict[str, Any]:
        name, context = named(model.name, adapter), model.limits.max_context_tokens
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": self._created,
            "lifecycle": "active",
            "max_input_tokens": context,
            "max_tokens": context,
        }


def _page(models: Sequence[Mapping[str, Any]], query: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The models after `after_id` or before `before_id`, at most `limit`. Raises InvalidRequest."""
    names = [model["id"] for model in models]
    limit = _limit(query.get("limit", [str(_MODELS)])[0])
    first, end = 0, len(names)
    if after := query.get("after_id"):
        first = _index(names, "after_id", after[0]) + 1
    elif before := query.get("before_id"):
        end = _index(names, "before_id", before[0])
        first = max(0, end - limit)
    page = models[first:end][:limit]
    has_more = first > 0 if "before_id" in query and "after_id" not in query else first + len(page) < len(names)
    ids = [model["id"] for model in page]
    return {
        "data": list(page),
        "has_more": has_more,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= _MOST_MODELS):
        raise InvalidRequest.of("limit", f"must be a whole number from 1 to {_MOST_MODELS}")
    return int(text)


def _index(names: Sequence[str], field: str, name: str) -> int:
    if name not in names:
        raise InvalidRequest.of(field, "is no model that is served")
    return names.index(name)
