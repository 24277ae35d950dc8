"""The plan to pull the beginning of a prompt from the prefix cache of another worker, where that is sooner."""

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from typing import NamedTuple

from discovery.record import PREFIX_LOANS
from router.routing.policy import LoadPlan, PeerPlan, RoutingRequest
from router.routing.prefix.cost import WorkerCost
from router.routing.prefix.prefix_caches import Below, Cache

# So many of the workers that have most of a prompt are compared: the others have less, or are equals of these.
_MOST_LENDERS = 3
# A loan must save so much: predictions are not better than that.
_LEAST_GAIN_SECONDS = 0.005


_NONE_BELOW = Below()


class Lender(NamedTuple):
    """A rank of a worker, and how many of a prompt's first blocks it has: in the pool of its device, and after them in
    host memory, from where it loads them before it lends them.
    """

    num_blocks: int
    cost: WorkerCost
    rank: int
    on_host: int = 0


def lenders(
    ranks: Iterable[tuple[WorkerCost, Cache]], blocks: Mapping[Cache, int], below: Mapping[Cache, Below]
) -> Sequence[Lender]:
    """Those of the ranks that have most of a prompt and can lend it: not what is on their disks."""
    found = {}
    for cost, cache in ranks:
        host, disk = below.get(cache, _NONE_BELOW)
        have = blocks.get(cache, 0) - disk
        if have > 0 and PREFIX_LOANS in cost.record.capabilities:
            found[cache] = Lender(have, cost, cache.rank, min(host, have))
    return nlargest(_MOST_LENDERS, found.values(), key=lambda lender: lender.num_blocks)


class OwnPlan(NamedTuple):
    """A worker's plan without a loan: the blocks that it does not compute, those of them in its pool, and loads."""

    blocks: int
    in_pool: int
    load: LoadPlan


class LoadCost(NamedTuple):
    """What it takes to load from host memory."""

    base_seconds: float
    block_seconds: float

    def seconds(self, blocks: int) -> float:
        """The time to load so many blocks."""
        return self.base_seconds + blocks * self.block_seconds if blocks > 0 else 0.0


def with_loan(
    own: OwnPlan, borrower: WorkerCost, available: Sequence[Lender], request: RoutingRequest, times: tuple[float, LoadCost]
) -> tuple[int, LoadPlan]:
    """The tokens that a worker will not compute, and what it loads or pulls for that: the least of all plans.

    A pull begins at once, beside the prompts before this one, which take the first of `times`; the second is what a
    lender takes to load what it has in host memory.
    """
    wait, loading = times
    size, tokens = request.blocks.block_tokens, request.prompt_tokens
    best = own.blocks, own.load
    if PREFIX_LOANS in borrower.record.capabilities:
        least = _seconds(borrower, tokens, own.blocks * size) + own.load.seconds - _LEAST_GAIN_SECONDS
        for lender in available:
            num_blocks, link = min(lender.num_blocks, (tokens - 1) // size), lender.cost.loan_to(borrower)
            if num_blocks <= own.blocks or not link.exists:
                continue
            pulled = num_blocks - own.in_pool
            loaded = loading.seconds(min(pulled, lender.on_host - (lender.num_blocks - num_blocks)))
            seconds = link.seconds(pulled * request.blocks.block_bytes) + loaded
            computing = _seconds(borrower, tokens, num_blocks * size)
            added = max(0.0, seconds - wait)
            if computing + added + link.distance < least:
                least = computing + added + link.distance
                saved = _seconds(borrower, tokens, own.in_pool * size) - computing
                peer = PeerPlan(lender.cost.record, lender.rank, num_blocks, pulled * size, seconds, saved, loaded)
                best = num_blocks, LoadPlan(seconds=added, peer=peer)
    return best[0] * size, best[1]


def _seconds(borrower: WorkerCost, tokens: int, cached: int) -> float:
    computed = tokens - cached
    return borrower.prefill.seconds(computed, cached + computed / 2)
