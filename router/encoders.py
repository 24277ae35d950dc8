"""Which encoder a request's media go through, and the worker that runs it: dedicated ones before all others."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router import policy
from router.cluster import Cluster
from router.config import RoutingConfig
from router.policy import Need
from router.worker import Worker
from rpc.errors import NoWorker


@dataclass(frozen=True, slots=True)
class Encoder:
    """What makes a model's embeddings: all of one request are of one encoder, whatever is being upgraded meanwhile.

    `layout` is that of the embeddings, and of the workers that can read them; `fingerprint` is of the tower's weights
    and the processor. Both are empty where workers do not say.
    """

    model: str
    layout: str
    fingerprint: str


class Encoders:
    """Applies the policy to the workers that encode."""

    def __init__(self, cluster: Cluster, config: RoutingConfig) -> None:
        self._cluster = cluster
        self._is_inline_allowed = config.inline_encode
        self._turns = itertools.count()
        self._newest: dict[tuple[str, str], Encoder] = {}

    def choose(self, model: str) -> Encoder:
        """The encoder whose embeddings most decode workers can read. Raises NoWorker if there is none at all.

        While no worker encodes it is the last one that did: what it has made may be cached.
        """
        need = Need("decode", model, context_tokens=0)
        readers = Counter(worker.embedding_layout for worker in self._able(need))
        if not readers:
            raise self._none(need)
        makers = {worker.embedding_layout: worker for worker in reversed(self._candidates(_need(model)))}
        layout = max(readers, key=lambda layout: (layout in makers, readers[layout]))
        if layout in makers:
            self._newest[model, layout] = Encoder(model, layout, makers[layout].encoder)
        if (model, layout) not in self._newest:
            raise self._none(replace(_need(model), embedding_layout=layout))
        return self._newest[model, layout]

    def place(self, encoder: Encoder, tried: frozenset[str]) -> Worker:
        """The least busy worker that runs this encoder. Raises NoWorker saying why each one was left out."""
        need = Need(
            "encode",
            encoder.model,
            context_tokens=0,
            embedding_layout=encoder.layout,
            encoder=encoder.fingerprint,
            tried=tried,
        )
        workers = self._candidates(need)
        if not workers:
            raise self._none(need)
        return workers[policy.pick(workers, policy.Wish(prompt_tokens=1, turn=next(self._turns)))]

    def _candidates(self, need: Need) -> Sequence[Worker]:
        dedicated = self._able(replace(need, is_dedicated=True))
        return dedicated or (self._able(need) if self._is_inline_allowed else [])

    def _able(self, need: Need) -> list[Worker]:
        workers = self._cluster.workers
        return [workers[index] for index in policy.filter(workers, need).able]

    def _none(self, need: Need) -> NoWorker:
        need = replace(need, is_dedicated=need.role == "encode" and not self._is_inline_allowed)
        reasons = policy.filter(self._cluster.workers, need).reasons()
        return NoWorker(f"no {need.role} worker of {need.model} is ready: {reasons}")


def _need(model: str) -> Need:
    return Need("encode", model, context_tokens=0)
