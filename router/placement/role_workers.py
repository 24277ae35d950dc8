"""Chooses the least loaded worker among those that can do something, for roles that no routing policy decides."""

import itertools
from collections.abc import Sequence

from baton.errors import NoWorker
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
