"""The embed role: turns texts into vectors, shortened and normalized as the request says."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy

from baton.engine.v1 import embed_pb2, embed_pb2_grpc
from baton.errors import EngineFailed, InvalidRequest
from baton.inference.v1 import embed_pb2 as inference_pb2
from baton.inference.v1 import generate_pb2, timing_pb2
from rpc.interceptors.calls import arrived_at
from rpc.server import Service
from rpc.violations import Violations
from runtime.clock import perf_counter
from services.engines.base import TextEmbedder, Vector
from services.engines.rules import EmbeddingRules
from services.identity import Identity
from services.parts import WorkerParts
from services.requests.calls import Calls
from services.telemetry import metrics
from services.telemetry.timings import Timing, stage_timings

SERVICE_NAME = embed_pb2.DESCRIPTOR.services_by_name["EmbedService"].full_name

_NUMBERS_A_TURN = 16_384  # that are put into a message before the event loop may do something else


class EmbedServicer(embed_pb2_grpc.EmbedServiceServicer):
    """EmbedService. Only a worker without the role has no `vector_maker`."""

    def __init__(self, identity: Identity, calls: Calls, vector_maker: "VectorMaker | None") -> None:
        self._identity = identity
        self._calls = calls
        self._vector_maker = vector_maker

    async def Embed(self, request: embed_pb2.EmbedRequest, context: Any) -> embed_pb2.EmbedResponse:
        with self._calls.run("embed", request.request_id, request.model, context.invocation_metadata()) as call:
            assert self._vector_maker is not None
            await call.faults.inject("queue")
            await call.faults.inject("embed")
            vectors = await self._vector_maker.make(request)
            return await _response(self._identity, request, vectors)


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of a call's inputs, in order, and the seconds since its arrival."""

    values: Sequence[Vector]
    seconds: float


class VectorMaker:
    """Makes vectors of at most `max_inputs` inputs a call."""

    def __init__(self, embedder: TextEmbedder, max_inputs: int) -> None:
        rules = embedder.facts.embedding
        assert rules is not None
        self._embedder = embedder
        self._rules = rules
        self._vocab_size = embedder.facts.vocab_size
        self._max_inputs = max_inputs

    async def make(self, request: embed_pb2.EmbedRequest) -> Vectors:
        """Checks a request and runs it. Raises InvalidRequest, and what the embedder raises."""
        started = arrived_at()
        self._check(request)
        whole = await self._embedder.embed([one.ids[:] for one in request.inputs])
        dimensions = request.dimensions or self._rules.dimensions
        normalize = request.normalize if request.HasField("normalize") else self._rules.normalize
        values = [_finished(vector, dimensions, normalize=normalize) for vector in whole]
        seconds = perf_counter() - started
        metrics.COMPUTE_SECONDS.labels("embed").observe(seconds)
        metrics.PROMPT_TOKENS.inc(sum(len(one.ids) for one in request.inputs))
        return Vectors(values, seconds)

    def _check(self, request: embed_pb2.EmbedRequest) -> None:
        if not 0 < len(request.inputs) <= self._max_inputs:
            raise InvalidRequest.of("inputs", f"has {len(request.inputs)} items; there may be 1 to {self._max_inputs}")
        violations = Violations()
        for index, one in enumerate(request.inputs):
            _check_input(f"inputs[{index}]", one, self._rules, self._vocab_size, violations)
        if request.HasField("dimensions"):
            violations.number("dimensions", request.dimensions, 1, self._rules.dimensions)
        violations.raise_any()


@asynccontextmanager
async def open_service(parts: WorkerParts) -> AsyncIterator[Service]:
    """Opens the role on a worker; one without it answers RoleMismatch."""
    worker = parts.worker
    embedder: TextEmbedder | None = worker.engines.part("embedder")
    maker = None if embedder is None else VectorMaker(embedder, parts.config.embed.max_inputs)
    servicer = EmbedServicer(worker.identity, parts.calls, maker)
    yield Service(SERVICE_NAME, embed_pb2_grpc.add_EmbedServiceServicer_to_server, servicer)


def _check_input(
    path: str, one: generate_pb2.TokenIds, rules: EmbeddingRules, vocab_size: int, violations: Violations
) -> None:
    violations.require(bool(one.ids), path, "is empty")
    fits = len(one.ids) <= rules.max_input_tokens
    violations.require(fits, path, f"has {len(one.ids)} tokens of at most {rules.max_input_tokens}")
    if fits:
        violations.token_ids(f"{path}.ids", one.ids, vocab_size)


def _finished(vector: Vector, dimensions: int, *, normalize: bool) -> Vector:
    """The beginning of a vector, scaled to the length 1 if asked for. A vector of zeros stays as it is."""
    vector = vector[:dimensions]
    if not numpy.isfinite(vector).all():
        raise EngineFailed("the model computed NaN or infinity for this input")
    length = float(numpy.linalg.norm(vector)) if normalize else 0.0
    return vector / numpy.float32(length) if length else vector


async def _response(identity: Identity, request: embed_pb2.EmbedRequest, vectors: Vectors) -> embed_pb2.EmbedResponse:
    timings = stage_timings([Timing(timing_pb2.STAGE_EMBED, vectors.seconds)], identity.worker_id)
    response = embed_pb2.EmbedResponse(timings=timings)
    added = 0
    for one, vector in zip(request.inputs, vectors.values, strict=True):
        response.embeddings.append(inference_pb2.TextEmbedding(values=vector.tolist(), num_tokens=len(one.ids)))
        added += vector.size
        if added >= _NUMBERS_A_TURN:
            added = 0
            await asyncio.sleep(0)
    return response
