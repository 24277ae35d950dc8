"""The cost of a request to the quotas, with many tenants beside its own."""

import statistics
import time

from support.clock import ManualClock

from router.admission.quotas import Quotas
from router.config import QuotaConfig, QuotasConfig
from router.telemetry.stats import RequestStats


async def serve(which: Quotas, name: str) -> None:
    """One request from its begin to its end."""
    async with which.track(name, RequestStats("r")), which.charge(name, 0):
        pass


async def test_names_that_are_made_up_cost_a_request_the_same_however_many_there_are() -> None:
    async def seconds_for(count: int) -> float:
        """The cost of a new tenant, after so many that all owe something."""
        default = QuotaConfig(requests_per_second=0.001, burst_seconds=1000)
        which = Quotas(QuotasConfig(default=default), ManualClock())
        for number in range(count):
            await serve(which, f"early {number}")
        costs = []
        for number in range(1000):
            started = time.perf_counter()
            await serve(which, f"late {number}")
            costs.append(time.perf_counter() - started)
        return statistics.median(costs)

    few, many = await seconds_for(100), await seconds_for(12_000)
    assert many < 10 * few
