"""Where a request runs: the workers chosen for it, and others when they fail."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.inference.v1 import generate_pb2

from router import policy
from router.cluster import Cluster
from router.config import RoutingConfig
from router.worker import Worker
from rpc.errors import NoWorker


@dataclass(frozen=True, slots=True)
class Placement:
    """The worker that decodes and, unless the prompt is run there too, the one that prefills."""

    decode: Worker
    prefill: Worker | None

    @property
    def topology(self) -> generate_pb2.Topology.ValueType:
        """As it is called on the wire."""
        return generate_pb2.TOPOLOGY_DISAGGREGATED if self.prefill else generate_pb2.TOPOLOGY_AGGREGATED


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of its workers."""

    model: str
    prompt_tokens: int
    routing: generate_pb2.RoutingOptions
    embedding_layout: str = ""  # of its media


class Placer:
    """Applies the policy to the cluster as it is now."""

    def __init__(self, cluster: Cluster, config: RoutingConfig) -> None:
        self._cluster = cluster
        self._config = config
        self._turns = {"prefill": itertools.count(), "decode": itertools.count()}

    def place(self, demand: Demand) -> Placement:
        """The first choice for a request. Raises NoWorker saying why each worker was left out.

        A prompt is prefilled apart from its decode wherever a worker with an equal KV layout exists.
        """
        need = _need("decode", demand)
        if not self._wants_prefill(demand):
            return Placement(self._choose(need, demand), None)
        if demand.routing.topology != generate_pb2.TOPOLOGY_DISAGGREGATED:
            decode = self._choose(need, demand)
            return Placement(decode, self._find_prefill(decode, demand, frozenset()))
        return self._place_apart(need, demand)

    def prefill_instead(self, placement: Placement, demand: Demand, tried: frozenset[str]) -> Worker | None:
        """Another prefill worker for the same decode worker. None: the prompt is to run there.

        Raises NoWorker if that is not what the request wants.
        """
        worker = self._find_prefill(placement.decode, demand, tried)
        if worker is None and demand.routing.topology == generate_pb2.TOPOLOGY_DISAGGREGATED:
            need = _prefill_need(placement.decode, demand, tried)
            raise NoWorker(f"no other prefill worker: {self._reasons(need)}")
        return worker

    async def await_decode(self, demand: Demand, context_tokens: int, tried: frozenset[str]) -> Worker:
        """A worker to continue on, from the ids alone, as soon as there is one."""
        need = replace(_need("decode", demand), context_tokens=context_tokens, tried=tried)
        while True:
            try:
                return self._choose(need, demand)
            except NoWorker:
                await self._cluster.change()

    def explain(self, demand: Demand) -> list[str]:
        """What each worker is worth to a request now (the least is the best), or why it is left out."""
        workers = self._cluster.workers
        wish = policy.Wish(demand.prompt_tokens)
        lines: list[str] = []
        for role in ("prefill", "decode"):
            filtered = policy.filter(workers, _need(role, demand))
            able = [workers[index] for index in filtered.able]
            for worker, times in zip(able, policy.slowness(able), strict=True):
                slow = f", {times:.3g} times as slow as usual" if times > 1 else ""
                lines.append(f"{role} {worker.record.worker_id}: {policy.score(worker, wish, times):.3g}{slow}")
            others = [one for one in filtered.left_out if one.reason != f"has no {role} role"]
            lines += [f"{role} {one.worker_id}: {one.reason}" for one in others]
        return lines

    def _wants_prefill(self, demand: Demand) -> bool:
        match demand.routing.topology:
            case generate_pb2.TOPOLOGY_AGGREGATED:
                return False
            case generate_pb2.TOPOLOGY_DISAGGREGATED:
                return True
            case _:
                return demand.prompt_tokens >= self._config.local_prefill_tokens

    def _place_apart(self, need: policy.Need, demand: Demand) -> Placement:
        """The best decode worker that has a prefill worker beside it."""
        workers = self._cluster.workers
        able = [workers[index] for index in policy.filter(workers, need).able]
        pairs = [(decode, self._find_prefill(decode, demand, frozenset())) for decode in able]
        paired = [(decode, prefill) for decode, prefill in pairs if prefill]
        if not paired:
            lacking = _prefill_need(able[0], demand, frozenset()) if able else need
            raise NoWorker(f"no {lacking.role} worker of {need.model} is ready: {self._reasons(lacking)}")
        decode, prefill = paired[policy.pick([decode for decode, _ in paired], self._wish("decode", demand))]
        return Placement(decode, prefill)

    def _find_prefill(self, decode: Worker, demand: Demand, tried: frozenset[str]) -> Worker | None:
        workers = self._cluster.workers
        able = policy.filter(workers, _prefill_need(decode, demand, tried)).able
        return self._best("prefill", [workers[index] for index in able], demand) if able else None

    def _choose(self, need: policy.Need, demand: Demand) -> Worker:
        workers = self._cluster.workers
        able = policy.filter(workers, need).able
        if not able:
            raise NoWorker(f"no {need.role} worker of {need.model} is ready: {self._reasons(need)}")
        return self._best(need.role, [workers[index] for index in able], demand)

    def _best(self, role: str, workers: Sequence[Worker], demand: Demand) -> Worker:
        return workers[policy.pick(workers, self._wish(role, demand))]

    def _wish(self, role: str, demand: Demand) -> policy.Wish:
        return policy.Wish(
            prompt_tokens=demand.prompt_tokens,
            session_key=demand.routing.session_key,
            slack=self._config.session_slack,
            turn=next(self._turns[role]),
        )

    def _reasons(self, need: policy.Need) -> str:
        return policy.filter(self._cluster.workers, need).reasons()


def _need(role: str, demand: Demand) -> policy.Need:
    return policy.Need(
        role, demand.model, context_tokens=demand.prompt_tokens + 1, embedding_layout=demand.embedding_layout
    )


def _prefill_need(decode: Worker, demand: Demand, tried: frozenset[str]) -> policy.Need:
    """A worker that can hand over to this one: another, with an equal layout."""
    return replace(
        _need("prefill", demand),
        layout_digest=decode.record.layout_digest,
        tried=tried | {decode.record.process},
    )
