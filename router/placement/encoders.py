"""Chooses the encoder version for a request's media, and encode workers, dedicated ones first.

Chooses the least loaded worker among those that can do something, for roles that no routing policy decides.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.errors import NoWorker
from router.config import RoutingConfig
from router.routing.filters import Constraints, filter_workers
from router.routing.scoring import Preferences, pick, score_workers
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle


class RoleWorkers:
    """Chooses by load; equally loaded workers take turns."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._turns = itertools.count()

    def ready(self, constraints: Constraints) -> Sequence[WorkerHandle]:
        """The workers that can be used now."""
        return filter_workers(self._cluster.workers, constraints).eligible

    def place(self, constraints: Constraints, tokens: int) -> WorkerHandle:
        """The least loaded worker for a call that computes these tokens. Raises NoWorker with a reason for each."""
        workers = self.ready(constraints)
        if not workers:
            raise self.none_ready(constraints)
        return self.among(workers, tokens)

    def among(self, workers: Sequence[WorkerHandle], tokens: int) -> WorkerHandle:
        """The least loaded of some workers."""
        preferences = Preferences(prompt_tokens=max(1, tokens), turn=next(self._turns))
        return pick(score_workers(workers, preferences), preferences)

    def none_ready(self, constraints: Constraints) -> NoWorker:
        """The error that says why no worker can be used."""
        reasons = filter_workers(self._cluster.workers, constraints).reasons()
        return NoWorker(f"no {constraints.role} worker of {constraints.model} is ready: {reasons}")


@dataclass(frozen=True, slots=True)
class EncoderVersion:
    """Identifies what makes a model's embeddings. One request uses one version, also during an upgrade.

    `layout` is that of the embeddings, and of the workers that can read them; `fingerprint` is that of the vision
    tower's weights and of the image processor. Both are empty if workers do not report them.
    """

    model: str
    layout: str
    fingerprint: str


class Encoders:
    """Chooses among the workers that encode, by their load."""

    def __init__(self, cluster: Cluster, config: RoutingConfig) -> None:
        self._workers = RoleWorkers(cluster)
        self._is_inline_allowed = config.inline_encode
        self._newest: dict[tuple[str, str], EncoderVersion] = {}

    def choose(self, model: str) -> EncoderVersion:
        """The encoder whose embeddings most decode workers can read. Raises NoWorker if there is none.

        While no worker encodes it is the last known one, whose embeddings may be cached.
        """
        decoding = Constraints("decode", model, context_tokens=0)
        readers = Counter(worker.embedding_layout for worker in self._workers.ready(decoding))
        if not readers:
            raise self._none(decoding)
        encoding = Constraints("encode", model, context_tokens=0)
        makers = {worker.embedding_layout: worker for worker in reversed(self._candidates(encoding))}
        layout = max(readers, key=lambda layout: (layout in makers, readers[layout]))
        if layout in makers:
            self._newest[model, layout] = EncoderVersion(model, layout, makers[layout].encoder)
        if (model, layout) not in self._newest:
            raise self._none(replace(encoding, embedding_layout=layout))
        return self._newest[model, layout]

    def place(self, encoder: EncoderVersion, tried: frozenset[str]) -> WorkerHandle:
        """The least loaded worker that runs this encoder. Raises NoWorker with the reason for each worker."""
        constraints = Constraints(
            "encode",
            encoder.model,
            context_tokens=0,
            embedding_layout=encoder.layout,
            encoder=encoder.fingerprint,
            tried=tried,
        )
        workers = self._candidates(constraints)
        if not workers:
            raise self._none(constraints)
        return self._workers.among(workers, 1)

    def _candidates(self, constraints: Constraints) -> Sequence[WorkerHandle]:
        dedicated = self._workers.ready(replace(constraints, is_dedicated=True))
        return dedicated or (self._workers.ready(constraints) if self._is_inline_allowed else ())

    def _none(self, constraints: Constraints) -> NoWorker:
        is_dedicated = constraints.role == "encode" and not self._is_inline_allowed
        return self._workers.none_ready(replace(constraints, is_dedicated=is_dedicated))
