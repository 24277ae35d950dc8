"""Says where a request would run, and why, without running it."""

import asyncio

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import cluster_service_pb2, generate_pb2
from router import validation
from router.config import LimitsConfig
from router.placement.placer import Placer
from router.recording.record import candidate_message
from router.routing.policy import RoutingRequest, needed_capabilities
from router.text import request_input
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle


class RoutingRequests:
    """Requests as the policy sees them, made as the pipeline does up to their placement; media are not loaded."""

    def __init__(self, cluster: Cluster, placer: Placer, limits: LimitsConfig) -> None:
        self._cluster = cluster
        self._placer = placer
        self._limits = limits

    async def make(self, request: generate_pb2.GenerateRequest) -> RoutingRequest:
        """Raises what `Generate` would raise for a request that cannot be run."""
        model = self._cluster.model(request.model)
        # Off the event loop: operators' prompts may be as long as clients'.
        await asyncio.to_thread(validation.check, request, model, self._limits)
        token_ids = await asyncio.to_thread(request_input.tokenize, request, model)
        lora = self._cluster.lora(request, model)
        prompt = prompt_pb2.Prompt(token_ids=token_ids, cache_salt=request.routing.cache_salt, lora=lora)
        return await self._placer.with_blocks(
            RoutingRequest(
                model.name,
                prompt,
                request.routing,
                answer_tokens=request.stopping.max_tokens,
                needs=needed_capabilities(request),
            )
        )


class RouteExplainer:
    """Says where a request would run."""

    def __init__(self, placer: Placer, requests: RoutingRequests, policy: str) -> None:
        self._placer = placer
        self._requests = requests
        self._policy = policy

    def cache_view(self, worker: WorkerHandle) -> generate_pb2.CacheView.ValueType:
        """The router's source of knowledge about the worker's prefix cache."""
        return self._placer.cache_view(worker)

    async def explain(self, request: generate_pb2.GenerateRequest) -> cluster_service_pb2.ExplainRouteResponse:
        """Raises what `Generate` would raise for a request that cannot be run."""
        routing = await self._requests.make(request)
        predictions = sorted(self._placer.predictions(routing), key=lambda prediction: prediction.total)
        return cluster_service_pb2.ExplainRouteResponse(
            policy=self._policy,
            prompt_tokens=routing.prompt_tokens,
            candidates=[candidate_message(prediction) for prediction in predictions],
            workers=self._placer.reasons(routing) if predictions else self._scores(routing),
        )

    def _scores(self, request: RoutingRequest) -> list[str]:
        """The reasons of a policy that does not predict. It places the request, which does not run."""
        placement = self._placer.place(request)
        placement.progress.close()
        return placement.explain()
