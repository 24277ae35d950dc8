"""The memory that cancelled requests leave in a router: what neither objects nor the garbage collector show."""

from benchmarks.leftovers.__main__ import measure
from benchmarks.leftovers.cluster import running_cluster
from benchmarks.leftovers.outcomes import OUTCOMES

NAME = "cancelled in prefill"
REQUESTS, LANES = 4000, 64
# Aborts by calls of their own left 2,000 bytes and more, in an allocator that could not give them back.
MOST_BYTES = 1000
# What requests leave, they leave in any router; on a busy machine one has more of them at once than another.
ATTEMPTS = 3


async def test_cancelled_requests_leave_no_memory_in_the_router() -> None:
    outcomes = [outcome for outcome in OUTCOMES if outcome.name == NAME]
    left = []
    for _ in range(ATTEMPTS):
        async with running_cluster("http2") as cluster:
            row = await measure(cluster, NAME, outcomes, REQUESTS, LANES)
        assert not row.wrong
        left.append(row.router)
        if row.router < MOST_BYTES:
            return
    raise AssertionError(f"bytes of a request in each router: {left}")
