"""The life of a request for embeddings, top to bottom: validate, tokenize, admit, embed.

The inputs of a request for embeddings: checks, and from texts to token ids. Nothing is cut.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from baton.errors import InvalidRequest
from baton.inference.v1 import embed_pb2, generate_pb2, model_pb2, timing_pb2
from router.admission.controller import AdmissionController
from router.admission.predictor import RequestEstimate
from router.context import ContextFactory, RequestContext, RunningRequests
from router.embedding.calls import ROLE, EmbedCalls, WantedVectors
from router.telemetry.spans import set_embed_attributes
from router.text.served_model import ServedModel
from router.workers.cluster import Cluster
from rpc.violations import Violations

# Of all vectors that are being made: 64 MiB, of which an answer has a copy or two.
_MOST_NUMBERS: Final = 2**24


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
    raise model.unsupported("embeddings, since no worker has the role embed")


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


def check_answer(request: embed_pb2.EmbedRequest, target: EmbeddingModel, max_numbers: int) -> None:
    """Raises InvalidRequest if the answer to a checked request would be too long: a short one may ask for much."""
    dimensions, number = _dimensions(request, target), len(request.inputs)
    most = max(1, max_numbers // dimensions)
    if number > most:
        raise InvalidRequest.of(
            "inputs",
            f"has {number}; of vectors of {dimensions} numbers an answer has at most {most}: send fewer at once, or ask"
            " for fewer dimensions",
        )


def _dimensions(request: embed_pb2.EmbedRequest, target: EmbeddingModel) -> int:
    return request.dimensions or target.rules.dimensions


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
        raise target.model.unsupported(f"{path}.text")
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


class VectorRoom:
    """The numbers of all vectors that are being made; requests wait for theirs, in the order in which they came."""

    def __init__(self, numbers: int) -> None:
        self._most = self._free = numbers
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, numbers: int) -> AsyncIterator[None]:
        """Has room for so many until the context is left, or all of it for one vector that is longer."""
        numbers = min(numbers, self._most)
        async with self._turn:
            while self._free < numbers:
                self._freed.clear()
                await self._freed.wait()
            self._free -= numbers
        try:
            yield
        finally:
            self._free += numbers
            self._freed.set()


class EmbedPipeline:
    """Runs requests for embeddings on a cluster."""

    def __init__(
        self,
        running: RunningRequests,
        contexts: ContextFactory,
        cluster: Cluster,
        admission: AdmissionController,
        calls: EmbedCalls,
    ) -> None:
        self._running = running
        self._contexts = contexts
        self._cluster = cluster
        self._admission = admission
        self._calls = calls
        self._room = VectorRoom(max(_MOST_NUMBERS, contexts.limits.max_embed_numbers))

    async def run(self, request: embed_pb2.EmbedRequest, call: object) -> embed_pb2.EmbedResponse:
        """Answers a call. Raises a BatonError if it fails. A cancellation of the caller means that the client left."""
        same = generate_pb2.GenerateRequest(request_id=request.request_id, model=request.model)
        ctx = self._contexts.create(same, call)
        ctx.stats.operation = ROLE
        response = embed_pb2.EmbedResponse(request_id=ctx.request_id)
        answer = partial(self._answer, ctx, request, response)
        await self._running.run(ctx, "baton.embed", partial(set_embed_attributes, request), answer)
        response.timings.extend(ctx.stats.timings.message().stages)
        return response

    async def _answer(
        self, ctx: RequestContext, request: embed_pb2.EmbedRequest, response: embed_pb2.EmbedResponse
    ) -> None:
        """Fills the response, within the tenant's quota."""
        async with self._admission.track_tenant(ctx):
            target = await self._validate(ctx, request)
            texts = await self._tokenize(ctx, request, target)
            tokens = ctx.stats.prompt_tokens = sum(len(one.ids) for one in texts)
            numbers = len(texts) * _dimensions(request, target)
            async with (
                self._admission.admit(ctx, RequestEstimate(target.model.name, tokens, None, ROLE)),
                self._room.hold(numbers),
            ):
                response.embeddings.extend(await self._embed(ctx, request, target, texts))
        response.model = target.model.name
        response.usage.prompt_tokens = tokens

    async def _validate(self, ctx: RequestContext, request: embed_pb2.EmbedRequest) -> EmbeddingModel:
        with ctx.stats.timings.measure(timing_pb2.STAGE_ADMISSION):
            await ctx.inject("admission")
            target = find_model(self._cluster, request.model)
            ctx.stats.model = target.model.name
            if ctx.is_large:
                await asyncio.to_thread(check, request, target, self._contexts.limits.max_embed_inputs)
            else:
                check(request, target, self._contexts.limits.max_embed_inputs)
            check_answer(request, target, self._contexts.limits.max_embed_numbers)
        return target

    async def _tokenize(
        self, ctx: RequestContext, request: embed_pb2.EmbedRequest, target: EmbeddingModel
    ) -> Sequence[generate_pb2.TokenIds]:
        with ctx.stats.timings.measure(timing_pb2.STAGE_TOKENIZE):
            await ctx.inject("tokenize")
            if ctx.is_large:
                return await asyncio.to_thread(tokenize, request, target)
            return tokenize(request, target)

    async def _embed(
        self,
        ctx: RequestContext,
        request: embed_pb2.EmbedRequest,
        target: EmbeddingModel,
        texts: Sequence[generate_pb2.TokenIds],
    ) -> Sequence[embed_pb2.TextEmbedding]:
        wanted = WantedVectors(
            target.model.name,
            request.dimensions if request.HasField("dimensions") else None,
            request.normalize if request.HasField("normalize") else None,
        )
        with ctx.stats.timings.measure(timing_pb2.STAGE_EMBED):
            return await self._calls.embed(ctx, wanted, texts)
