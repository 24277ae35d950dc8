"""The plan to pull the beginning of a prompt from the prefix cache of another worker, where that is sooner."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """A rank of a worker, how many of a prompt's first blocks it has in the pool of its device and in host memory, and
    how long it takes to load the latter into the pool, from where they are lent.
    """

    num_blocks: int
    cost: WorkerCost
    rank: int
    loading_seconds: float = 0.0


def lenders(
    ranks: Iterable[tuple[WorkerCost, Cache]],
    blocks: Mapping[Cache, int],
    below: Mapping[Cache, Below],
    load_seconds: Callable[[int], float],
) -> Sequence[Lender]:
    """Those of the ranks that have most of a prompt and can lend it: not what is on their disks. `load_seconds` is the
    time to load so many blocks from host memory.
    """
    found = {}
    for cost, cache in ranks:
        host, disk = below.get(cache, _NONE_BELOW)
        have = blocks.get(cache, 0) - disk
        if have > 0 and PREFIX_LOANS in cost.record.capabilities:
            found[cache] = Lender(have, cost, cache.rank, load_seconds(host) if host else 0.0)
    return nlargest(_MOST_LENDERS, found.values(), key=lambda lender: lender.num_blocks)


class OwnPlan(NamedTuple):
    """A worker's plan without a loan: the blocks that it does not compute, those of them in its pool, and loads."""

    blocks: int
    in_pool: int
    load: LoadPlan


def with_loan(
    own: OwnPlan, borrower: WorkerCost, available: Sequence[Lender], request: RoutingRequest, wait: float
) -> tuple[int, LoadPlan]:
    """The tokens that a worker will not compute, and what it loads or pulls for that: the least of all plans.

    A pull begins at once, beside the prompts before this one, which take `wait` seconds.
    """
    size, tokens = request.blocks.block_tokens, request.prompt_tokens
    best = own.blocks, own.load
    if PREFIX_LOANS in borrower.record.capabilities:
        least = _seconds(borrower, tokens, own.blocks * size) + own.load.seconds - _LEAST_GAIN_SECONDS
        for lender in available:
            num_blocks, link = min(lender.num_blocks, (tokens - 1) // size), lender.cost.loan_to(borrower)
            if num_blocks <= own.blocks or not link.exists:
                continue
            pulled = num_blocks - own.in_pool
            seconds = link.seconds(pulled * request.blocks.block_bytes) + lender.loading_seconds
            computing = _seconds(borrower, tokens, num_blocks * size)
            added = max(0.0, seconds - wait)
            if computing + added + link.distance < least:
                least = computing + added + link.distance
                saved = _seconds(borrower, tokens, own.in_pool * size) - computing
                peer = PeerPlan(
                    lender.cost.record, lender.rank, num_blocks, pulled * size, seconds, saved, lender.loading_seconds
                )
                best = num_blocks, LoadPlan(seconds=added, peer=peer)
    return best[0] * size, best[1]


def _seconds(borrower: WorkerCost, tokens: int, cached: int) -> float:
    computed = tokens - cached
    return borrower.prefill.seconds(computed, cached + computed / 2)
