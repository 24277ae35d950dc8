"""The services that a router offers: what clients call, and what operators ask about the fleet."""

from collections.abc import Iterable
from typing import Any

from baton.inference.v1 import (
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    generate_pb2,
    inference_service_pb2_grpc,
    model_pb2,
    tokenize_pb2,
)
from grpc import aio

from router import reports
from router.cluster import Cluster
from router.fault_plan import take_plan
from router.pipeline import Pipeline
from router.reply import reply_to
from router.standing import take_standing
from router.tokenization import Tokenization
from router.unary import Collected

Context = aio.ServicerContext[Any, Any]


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """What clients call."""

    def __init__(
        self,
        pipeline: Pipeline,
        tokenization: Tokenization,
        cluster: Cluster,
        *,
        allow_faults: bool = False,
        proxies: Iterable[str] = (),
    ) -> None:
        self._pipeline = pipeline
        self._tokenization = tokenization
        self._cluster = cluster
        self._allow_faults = allow_faults
        self._proxies = frozenset(proxies)

    # Writes instead of yielding: what waits is written together, and a client that leaves stops it all at once.
    async def Generate(self, request: generate_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        take_plan(context, is_allowed=self._allow_faults)
        take_standing(context.invocation_metadata(), self._proxies)
        await self._pipeline.generate(request, reply_to(context))

    async def GenerateUnary(
        self, request: generate_pb2.GenerateUnaryRequest, context: Context
    ) -> generate_pb2.GenerateUnaryResponse:
        take_plan(context, is_allowed=self._allow_faults)
        take_standing(context.invocation_metadata(), self._proxies)
        collected = Collected()
        await self._pipeline.generate(request.request, reply_to(context, collected.send))
        return collected.response

    async def CancelGeneration(
        self, request: generate_pb2.CancelGenerationRequest, _context: Context
    ) -> generate_pb2.CancelGenerationResponse:
        running = self._pipeline.requests.find(request.request_id)
        receipts = await running.cancel("cancelled by CancelGeneration")
        return generate_pb2.CancelGenerationResponse(receipts=receipts)

    async def Tokenize(self, request: tokenize_pb2.TokenizeRequest, _context: Context) -> tokenize_pb2.TokenizeResponse:
        return await self._tokenization.tokenize(request)

    async def Detokenize(
        self, request: tokenize_pb2.DetokenizeRequest, _context: Context
    ) -> tokenize_pb2.DetokenizeResponse:
        return await self._tokenization.detokenize(request)

    async def ListModels(
        self, _request: model_pb2.ListModelsRequest, _context: Context
    ) -> model_pb2.ListModelsResponse:
        models = [reports.model(served, self._cluster) for served in self._cluster.models]
        return model_pb2.ListModelsResponse(models=models)

    async def GetModel(self, request: model_pb2.GetModelRequest, _context: Context) -> model_pb2.GetModelResponse:
        served = self._cluster.model(request.name)
        return model_pb2.GetModelResponse(model=reports.model(served, self._cluster))


class ClusterServicer(cluster_service_pb2_grpc.ClusterServiceServicer):
    """What operators ask."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def ListWorkers(
        self, _request: cluster_service_pb2.ListWorkersRequest, _context: Context
    ) -> cluster_service_pb2.ListWorkersResponse:
        workers = sorted(self._cluster.workers, key=lambda worker: worker.record.worker_id)
        return cluster_service_pb2.ListWorkersResponse(workers=[reports.worker(worker) for worker in workers])
