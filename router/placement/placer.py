"""Places requests: filters the workers of the cluster, and lets the policy choose; again when a worker fails."""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, NoReturn

from baton.errors import BatonError, LayoutMismatch, NoWorker, Unsupported
from baton.inference.v1 import generate_pb2, lora_pb2
from discovery.pairing import can_hand_over, layout_mismatch, layout_name
from discovery.record import KEEPS_STREAMS, MOVES_DECODES, Domain
from discovery.registry import WorkerRecord
from router.config import RoutingConfig
from router.routing.filters import Constraints, EligibleWorkers, Filtered, filter_workers
from router.routing.policy import Candidates, Placement, Policy, PredictingPolicy, Prediction, RoutingRequest
from router.routing.prefix.prompt_blocks import PromptHasher
from router.routing.scoring import prefer_loaded
from router.workers.cluster import Cluster
from router.workers.destinations import can_hand_over_early
from router.workers.handle import WorkerHandle


class Placer:
    """Applies the policy to the cluster as it is now."""

    def __init__(self, cluster: Cluster, config: RoutingConfig, policy: Policy) -> None:
        self._cluster = cluster
        self._config = config
        self._within = config.handoff_within
        self._policy = policy
        self._hasher = PromptHasher()
        self._eligible: EligibleWorkers[WorkerHandle] = EligibleWorkers()
        # Those of the last request, by its model and by whether it must run disaggregated.
        self._usual: dict[tuple[str, bool], _Usual] = {}
        # Once: checking an object against a Protocol takes longer than choosing the workers.
        self._predicting = policy if isinstance(policy, PredictingPolicy) else None

    async def with_blocks(self, request: RoutingRequest) -> RoutingRequest:
        """The request with the blocks of its prompt, if the policy uses them."""
        if self._predicting is None:
            return request
        model = self._cluster.model(request.model)
        if self._hasher.is_quick(request):
            return request.with_blocks(self._hasher.blocks(request, model))
        return request.with_blocks(await asyncio.to_thread(self._hasher.named_blocks, request, model))

    def place(self, request: RoutingRequest, among: Collection[str] | None = None) -> Placement[WorkerHandle]:
        """The workers for a new request. Raises NoWorker with the reason for each worker, and LayoutMismatch if the
        request must run disaggregated and no prefill and decode worker have equal layouts.

        It decodes on one of the processes `among`, if they are given.

        Prefill and decode run apart wherever there are workers with equal KV layouts for it, unless the policy prefers
        to run the prompt on the decode worker.
        """
        chosen = self._choose(request, self._candidates(request, among))
        explain = partial(self._explain, request, chosen)
        return Placement(chosen.decode, chosen.prefill, explain, chosen.prediction, chosen.progress, chosen.candidates)

    def hands_over_early(self, placement: Placement[WorkerHandle], request: RoutingRequest) -> bool:
        """True if the decode worker is to read KV while the prompt is computed."""
        least = self._config.early_handoff_tokens
        return 0 < least <= request.prompt_tokens and can_hand_over_early(placement)

    def predictions(self, request: RoutingRequest) -> list[Prediction[WorkerHandle]]:
        """A request's predicted cost at each placement; empty if the policy does not predict. Raises NoWorker."""
        if self._predicting is None:
            return []
        return self._predicting.predictions(request, self._candidates(request))

    def cache_view(self, worker: WorkerHandle) -> generate_pb2.CacheView.ValueType:
        """The policy's source of knowledge about the worker's prefix cache."""
        if self._predicting is None:
            return generate_pb2.CACHE_VIEW_NONE
        return self._predicting.cache_view(worker.record.process)

    def reasons(self, request: RoutingRequest) -> list[str]:
        """The reason for each worker that cannot run the request."""
        prefill = self._filter(_constraints("prefill", request))
        decode = self._filter(_constraints("decode", request))
        lines = [*_left_out("prefill", prefill), *_left_out("decode", decode)]
        for worker in decode.eligible:
            constraints = _prefill_constraints(worker, request, frozenset(), self._within)
            for other, reason in filter_workers(prefill.eligible, constraints).others:
                if other.record.worker_id != worker.record.worker_id:
                    lines.append(f"prefill {other.record.worker_id} for decode {worker.record.worker_id}: {reason}")
        return lines

    def can_prefill(self, placement: Placement[WorkerHandle], request: RoutingRequest, tried: frozenset[str]) -> bool:
        """True if another prefill worker can hand over to the decode worker now."""
        return bool(self._filter(_prefill_constraints(placement.decode, request, tried, self._within)).eligible)

    def replace_prefill(
        self, placement: Placement[WorkerHandle], request: RoutingRequest, tried: frozenset[str]
    ) -> Placement[WorkerHandle]:
        """A placement with another prefill worker, or with none to run the prompt on the same decode worker.

        Raises NoWorker if there is none and the request must run disaggregated.
        """
        filtered = self._filter(_prefill_constraints(placement.decode, request, tried, self._within))
        if filtered.eligible:
            able = Candidates([placement.decode], filtered.eligible, requires_prefill=True, within=self._within)
            return self._choose(request, prefer_loaded(able, request.lora))
        if _is_disaggregated(request):
            raise NoWorker(f"no other prefill worker: {filtered.reasons()}")
        return self._choose(request, Candidates([placement.decode]))

    def can_decode(self, request: RoutingRequest, context_tokens: int, tried: frozenset[str]) -> bool:
        """True if there is a worker now that the request can continue on."""
        return bool(self._filter(_continue_constraints(request, context_tokens, tried)).eligible)

    async def await_decode(
        self, request: RoutingRequest, context_tokens: int, tried: frozenset[str]
    ) -> Placement[WorkerHandle]:
        """Waits for a worker that can continue the request from its ids."""
        constraints = _continue_constraints(request, context_tokens, tried)
        while True:
            if eligible := self._filter(constraints).eligible:
                return self._choose(request, prefer_loaded(Candidates(eligible), request.lora))
            await self._cluster.change()

    async def await_next_process(self, lost: WorkerRecord) -> WorkerHandle:
        """Waits until a later process of a worker is ready."""
        return await self._cluster.next_process(lost)

    async def change(self) -> None:
        """Waits until a worker has changed."""
        await self._cluster.change()

    def move_targets(
        self, request: RoutingRequest, context_tokens: int, source: WorkerHandle, tried: frozenset[str] = frozenset()
    ) -> list[WorkerHandle]:
        """The workers that can take over a running decode of another one, with its KV."""
        constraints = _continue_constraints(request, context_tokens, tried)
        kept = (KEEPS_STREAMS,) if KEEPS_STREAMS in source.record.capabilities else ()
        able = self._filter(replace(constraints, needs=(*request.needs, MOVES_DECODES, *kept))).eligible
        return [worker for worker in able if can_hand_over(source.record, worker.record, self._within)]

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerHandle]) -> WorkerHandle:
        """The best of these decode workers."""
        chosen = self._choose(request, prefer_loaded(Candidates(workers), request.lora))
        chosen.progress.close()
        return chosen.decode

    def _candidates(self, request: RoutingRequest, among: Collection[str] | None = None) -> Candidates[WorkerHandle]:
        lora = request.lora
        able = self._able(request, lora, among)
        return able if lora is None else prefer_loaded(able, lora)

    def _able(
        self, request: RoutingRequest, lora: lora_pb2.LoraAdapter | None, among: Collection[str] | None
    ) -> Candidates[WorkerHandle]:
        decode = self._find("decode", request, lora)
        if among is not None:
            decode = tuple(worker for worker in decode if worker.record.process in among)
        if self._config.beside:
            decode = tuple(worker for worker in decode if worker.record.host == self._config.beside) or decode
        if not decode:
            self._raise_lacking(request)
            constraints = _constraints("decode", request)
            _raise_none(constraints, self._filter(constraints))
        if not self._wants_prefill(request):
            return Candidates(decode)
        prefill = self._find("prefill", request, lora)
        is_disaggregated = _is_disaggregated(request)
        usual = self._usual.get((request.model, is_disaggregated))
        # The same objects, as long as no worker changes.
        if usual is not None and usual.decode is decode and usual.prefill is prefill:
            return usual.candidates
        if usual is not None:
            self._usual.clear()  # also those of models that have gone
        found = Candidates(decode, prefill, is_disaggregated, self._within)
        if is_disaggregated:
            found = self._paired(request, found)
        self._usual[request.model, is_disaggregated] = _Usual(decode, prefill, found)
        return found

    def _paired(self, request: RoutingRequest, candidates: Candidates[WorkerHandle]) -> Candidates[WorkerHandle]:
        """Leaves out the decode workers that no prefill worker can hand over to. Raises LayoutMismatch, and NoWorker
        if workers of equal layouts exist that are not ready.
        """
        paired = [worker for worker in candidates.decode if candidates.prefill_for(worker)]
        if not paired:
            if mismatch := layout_mismatch((worker.record for worker in self._cluster.workers), request.model):
                raise LayoutMismatch(mismatch)
            constraints = _prefill_constraints(candidates.decode[0], request, frozenset(), self._within)
            _raise_none(constraints, self._filter(constraints))
        return Candidates(paired, candidates.prefill, candidates.requires_prefill, candidates.within)

    def _raise_lacking(self, request: RoutingRequest) -> None:
        """Raises Unsupported if only what the request needs beside a worker of its model keeps it from all of them."""
        others = self._filter(replace(_constraints("decode", request), needs=())).eligible
        if request.needs and others:
            named = ", ".join(f"sampling.{name}" for name in request.needs)
            raise Unsupported(f"{named}: no ready worker of {request.model} takes it; upgrade them")

    def _choose(self, request: RoutingRequest, candidates: Candidates[WorkerHandle]) -> Placement[WorkerHandle]:
        """Raises BatonError, for INTERNAL, if the policy breaks its contract."""
        placement = self._policy.choose(request, candidates)
        if not candidates.allow(placement.decode, placement.prefill):
            raise BatonError(f"the routing policy {type(self._policy).__name__} chose a worker that is not a candidate")
        return placement

    def _explain(self, request: RoutingRequest, placement: Placement[WorkerHandle]) -> list[str]:
        """The policy's reasons, then why other workers were not eligible."""
        return placement.explain() + self.reasons(request)

    def _wants_prefill(self, request: RoutingRequest) -> bool:
        match request.routing.topology:
            case generate_pb2.TOPOLOGY_AGGREGATED:
                return False
            case generate_pb2.TOPOLOGY_DISAGGREGATED:
                return True
            case _:
                return request.prompt_tokens >= self._config.local_prefill_tokens

    def _find(self, role: str, request: RoutingRequest, lora: lora_pb2.LoraAdapter | None) -> tuple[WorkerHandle, ...]:
        """The eligible workers of a role."""
        if lora is not None or request.needs:
            return self._filter(_constraints(role, request)).eligible
        context = request.prompt_tokens + 1
        return self._eligible.find(self._cluster, role, request.model, context, request.embedding_layout)

    def _filter(self, constraints: Constraints) -> Filtered[WorkerHandle]:
        return filter_workers(self._cluster.workers, constraints)


class _Usual(NamedTuple):
    """The candidates that were found among the eligible workers of both roles."""

    decode: tuple[WorkerHandle, ...]
    prefill: tuple[WorkerHandle, ...]
    candidates: Candidates[WorkerHandle]


def _left_out(role: str, filtered: Filtered[WorkerHandle]) -> Iterator[str]:
    """The reasons for which workers of the role were rejected."""
    other_roles = f"has no {role} role"
    return (f"{role} {worker.record.worker_id}: {why}" for worker, why in filtered.others if why != other_roles)


def _is_disaggregated(request: RoutingRequest) -> bool:
    return request.routing.topology == generate_pb2.TOPOLOGY_DISAGGREGATED


def _raise_none(constraints: Constraints, filtered: Filtered[WorkerHandle]) -> NoReturn:
    raise NoWorker(f"no {constraints.role} worker of {constraints.model} is ready: {filtered.reasons()}")


def _constraints(role: str, request: RoutingRequest) -> Constraints:
    return Constraints(
        role,
        request.model,
        context_tokens=request.prompt_tokens + 1,
        embedding_layout=request.embedding_layout,
        lora=request.lora,
        needs=request.needs,
    )


def _continue_constraints(request: RoutingRequest, context_tokens: int, tried: frozenset[str]) -> Constraints:
    return replace(_constraints("decode", request), context_tokens=context_tokens, tried=tried)


def _prefill_constraints(
    decode: WorkerHandle, request: RoutingRequest, tried: frozenset[str], within: Domain | None
) -> Constraints:
    """A prefill worker that can hand over to this one: another process with the same KV layout, near enough."""
    return replace(
        _constraints("prefill", request),
        layout_digest=decode.record.layout_digest,
        layout=layout_name(decode.record),
        reads=decode.record.reads,
        tried=tried | {decode.record.process},
        near=decode.record,
        within=within,
    )
