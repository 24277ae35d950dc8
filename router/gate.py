"""Lets requests in to the workers: within quotas, when there is room, and only if their deadline can be met."""

import time
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial

from baton.inference.v1 import timing_pb2

from router import metrics
from router.account import Account
from router.cluster import Cluster
from router.config import AdmissionConfig
from router.deadline import Deadline
from router.forecast import Candidate, Forecast
from router.line import Line
from router.quotas import Quotas
from router.standing import current_standing
from rpc.errors import DeadlineUnreachable


class Gate:
    """One line a model. Without a limit on what runs nobody waits, and only hopeless requests are refused."""

    def __init__(self, cluster: Cluster, config: AdmissionConfig, quotas: Quotas) -> None:
        self._quotas = quotas
        self._cluster = cluster
        self._config = config
        self._forecast = Forecast(cluster)
        self._lines: dict[str, Line] = {}

    def serving(self, account: Account) -> AbstractContextManager[None]:
        """The time of a request, counted for its tenant. Raises QuotaExceeded."""
        return self._quotas.serving(current_standing().tenant, account)

    @asynccontextmanager
    async def inside(self, candidate: Candidate, deadline: Deadline, account: Account) -> AsyncGenerator[None, None]:
        """The time on workers. Raises, before any of it is lost: DeadlineUnreachable, QuotaExceeded, and Overloaded if
        too many wait.
        """
        standing = current_standing()
        line = self._line(candidate.model)
        with account.ledger.measure(timing_pb2.STAGE_ADMISSION):
            self._refuse_hopeless(candidate, deadline, line.expected_seconds(standing.priority))
            self._quotas.charge(standing.tenant, candidate.prompt_tokens)
            has_waited = await _enter(line, standing.priority)
        entered = time.monotonic()
        try:
            if has_waited:
                with account.ledger.measure(timing_pb2.STAGE_ADMISSION):
                    self._refuse_hopeless(candidate, deadline, 0.0)
            yield
            self._forecast.learn(candidate, len(account.token_ids))
        finally:
            line.leave(time.monotonic() - entered)

    def _refuse_hopeless(self, candidate: Candidate, deadline: Deadline, waiting_seconds: float) -> None:
        if not (self._config.predict_deadlines and deadline.is_callers):
            return
        predicted = waiting_seconds + (self._forecast.seconds(candidate) or 0.0)
        remaining = deadline.remaining_seconds
        if predicted <= remaining:
            return
        metrics.REFUSALS.labels(DeadlineUnreachable.reason).inc()
        raise DeadlineUnreachable(
            f"it would take {predicted:.3g} s, and the deadline is in {remaining:.3g} s",
            retry_after_seconds=min(60.0, max(0.1, predicted - remaining)),
        )

    def _line(self, model: str) -> Line:
        line = self._lines.get(model)
        if line is None:
            # Models come and go; lines that nobody is in are not kept for them.
            self._lines = {name: kept for name, kept in self._lines.items() if not kept.is_unused}
            line = self._lines[model] = Line(partial(self._limit, model), self._config.max_waiting)
        return line

    def _limit(self, model: str) -> int:
        """How many requests of a model may run: so many for each worker that can decode them."""
        if not self._config.max_running_per_worker:
            return 0
        able = [
            worker
            for worker in self._cluster.workers
            if worker.record.model == model and "decode" in worker.record.roles and not worker.problem
        ]
        return self._config.max_running_per_worker * len(able)


async def _enter(line: Line, priority: int) -> bool:
    """Whether it took any time."""
    if line.enter_now():
        metrics.QUEUE_SECONDS.observe(0.0)
        return False
    with metrics.QUEUE_SECONDS.time():
        await line.enter(priority)
    return True
