"""The cost of a decision with 1,000 tenants: which waiting request is next, and whether a request is within a quota."""

import statistics
import time
from collections.abc import Callable

from baton.engine.v1 import peer_pb2
from benchmarks.fairness.loads import Bars
from router.admission.fair_queue import FairQueue
from router.admission.ledger import THIS_ROUTER, Ledger
from router.config import QuotaConfig, QuotasConfig
from router.peers.quorum import Quorum

TENANTS = 1000
_ROUTERS = [f"r{number}" for number in range(8)]
_ROUNDS, _DECISIONS = 40, 500


def measure_decision(bars: Bars) -> None:
    """Prints both beside the bar: medians of rounds of this thread's CPU time."""
    queue, served = FairQueue("weighted"), [f"tenant {number}" for number in range(TENANTS)] * 5

    def wait_again() -> None:
        for name in served:
            queue.push(queue.ticket(name, 0, 1000))
        served.clear()

    def next_request() -> None:
        ticket = queue.pop()
        queue.end(ticket, 0, 200)
        served.append(ticket.tenant.name)

    _check(bars, "the next request of 1,000 tenants, and its end", next_request, wait_again)
    quorum, names = _agreed(), (f"tenant {number % TENANTS}" for number in range(10**9))
    ledger = Ledger(QuotasConfig(default=QuotaConfig(tokens_per_second=1e9, requests_per_second=1e6)))

    def within_quota() -> None:
        tenant = next(names)
        since = quorum.lends_since(tenant)
        if since is not None:
            ledger.lend(THIS_ROUTER, peer_pb2.QuotaAsk(tenant=tenant, requests=1, tokens=100), since)

    _check(bars, "the quota of one of 1,000 tenants, of which every eighth is lent here", within_quota)


def _check(bars: Bars, name: str, decide: Callable[[], None], prepare: Callable[[], None] = lambda: None) -> None:
    times = []
    for _ in range(_ROUNDS):
        prepare()
        began = time.thread_time()
        for _ in range(_DECISIONS):
            decide()
        times.append((time.thread_time() - began) / _DECISIONS * 1e6)
    print(f"decision, {name}: {min(times):.2f} to {max(times):.2f} µs in {_ROUNDS} rounds of {_DECISIONS}", flush=True)
    bars.check(f"decision, {name}: µs, median of the rounds", statistics.median(times), most=10.0)


def _agreed() -> Quorum:
    """Eight routers that have known each other for a while, as the first of them sees it."""
    quorum = Quorum(_ROUTERS[0])
    quorum.set_members(_ROUTERS)
    promise = peer_pb2.PromiseResponse(routers=_ROUTERS, seconds=3600, age_seconds=100, changes=1, knows_caller=True)
    for name in _ROUTERS[1:]:
        quorum.take(name, promise, time.monotonic())
    return quorum
