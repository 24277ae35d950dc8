"""The worker's side of the role rerank: servicer, logic and conversion."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy
import rerank_pb2
import rerank_pb2_grpc
from rerank_role import KIND, ROLE

from rpc.server import Service
from rpc.violations import Violations
from services.engines.base import TextEmbedder
from services.parts import WorkerParts
from services.requests.calls import Calls

_MOST_DOCUMENTS = 256  # of one call


class ScoreServicer(rerank_pb2_grpc.ScoreServiceServicer):
    """ScoreService. Only a worker without the role, whose calls end with RoleMismatch, has no `embedder`."""

    def __init__(self, calls: Calls, embedder: TextEmbedder | None) -> None:
        self._calls = calls
        self._embedder = embedder

    async def Score(self, request: rerank_pb2.ScoreRequest, context: Any) -> rerank_pb2.ScoreResponse:
        with self._calls.run(ROLE, request.request_id, request.model, context.invocation_metadata()) as call:
            assert self._embedder is not None
            await call.faults.inject(ROLE)
            _check(request, self._embedder)
            texts = [list(one.ids) for one in (request.query, *request.documents)]
            return rerank_pb2.ScoreResponse(scores=_cosines(await self._embedder.embed(texts)))


@asynccontextmanager
async def open_service(parts: WorkerParts) -> AsyncIterator[Service]:
    """Opens the role on a worker; one without it answers RoleMismatch."""
    servicer = ScoreServicer(parts.calls, parts.worker.engines.part(KIND.engine))
    yield Service(KIND.service, rerank_pb2_grpc.add_ScoreServiceServicer_to_server, servicer)


def _check(request: rerank_pb2.ScoreRequest, embedder: TextEmbedder) -> None:
    violations = Violations()
    if violations.count("documents", len(request.documents), _MOST_DOCUMENTS):
        most, vocabulary = embedder.facts.embedding.max_input_tokens, embedder.facts.vocab_size
        named = {"query": request.query, **{f"documents[{i}]": one for i, one in enumerate(request.documents)}}
        for path, one in named.items():
            violations.require(0 < len(one.ids) <= most, path, f"has {len(one.ids)} tokens; it may have 1 to {most}")
            violations.token_ids(f"{path}.ids", one.ids, vocabulary)
    violations.raise_any()


def _cosines(vectors: Sequence[numpy.ndarray]) -> list[float]:
    query, *documents = [vector / (numpy.linalg.norm(vector) or 1.0) for vector in vectors]
    return [float(query @ document) for document in documents]
