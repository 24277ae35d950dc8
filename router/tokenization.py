"""Tokenize and Detokenize: a model's tokenizer, for clients that want to count or to look."""

import asyncio

from baton.inference.v1 import tokenize_pb2

from router import admission
from router.cluster import Cluster
from router.model import ServedModel
from router.violations import Violations


class Tokenization:
    """Turns text into ids and back, off the event loop."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def tokenize(self, request: tokenize_pb2.TokenizeRequest) -> tokenize_pb2.TokenizeResponse:
        """The ids of a prompt or of a conversation. Raises InvalidRequest, Unsupported."""
        return await asyncio.to_thread(_tokenize, request, self._cluster.model(request.model))

    async def detokenize(self, request: tokenize_pb2.DetokenizeRequest) -> tokenize_pb2.DetokenizeResponse:
        """The text of ids. Raises InvalidRequest, Unsupported."""
        return await asyncio.to_thread(_detokenize, request, self._cluster.model(request.model))


def _tokenize(request: tokenize_pb2.TokenizeRequest, model: ServedModel) -> tokenize_pb2.TokenizeResponse:
    violations = Violations()
    if request.WhichOneof("input") == "chat":
        admission.check_chat(request.chat, model, violations)
        violations.raise_any()
        admission.require_chat(request.chat, model)
        ids, text = admission.encode_chat(request.chat, model)
        return tokenize_pb2.TokenizeResponse(token_ids=ids, text=text)
    admission.check_prompt(request.prompt, model, violations)
    violations.raise_any()
    ids = admission.text_tokenizer(model).encode(request.prompt)
    return tokenize_pb2.TokenizeResponse(token_ids=ids, text=request.prompt)


def _detokenize(request: tokenize_pb2.DetokenizeRequest, model: ServedModel) -> tokenize_pb2.DetokenizeResponse:
    violations = Violations()
    violations.token_ids("token_ids", request.token_ids, model.limits.vocab_size)
    violations.raise_any()
    text = admission.text_tokenizer(model).decode(request.token_ids, request.keep_special_tokens)
    return tokenize_pb2.DetokenizeResponse(text=text)
