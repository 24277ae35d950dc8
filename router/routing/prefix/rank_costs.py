"""The costs of a prompt at each data-parallel rank of the workers that could run it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from router.routing.policy import NO_LOAD, LoadPlan, RoutingRequest, W
from router.routing.prefix.cost import Costs, RelativeCost, WorkerCost
from router.routing.prefix.loans import Lender, OwnPlan, lenders, with_loan
from router.routing.prefix.prefix_caches import Below, Cache
from router.routing.prefix.work import PromptQueue, RankWork

# The longest answer that counts where it is decoded: it may be much shorter than the limit.
_ANSWER_TOKENS = 128
# For a decode worker without room for the prompt, and for each that waits there already: until others have ended.
_NO_ROOM_SECONDS = 1.0
# A second in which a running stream stands still counts as so many seconds of a request that has not begun. Its client
# is reading, and a queue in front of prefill workers is seen by the policy, unlike a pause of the next streams.
_STALL_WEIGHT = 2.0
# For a model that sleeps, beside the time to wake: another one, which it displaces, loses its cache.
_ASLEEP_SECONDS = 1.0
# For so many lists of workers it is remembered which ranks they have.
_MOST_LISTS = 64

# Ranks are plain tuples, since each request has one for every rank, and objects take five times as long. They compare
# by the order in which they are combined into pairs: those that were given fewer tokens come first among equals, and
# no two have the same number. Of one for prefill: the seconds to the first token (the wait and the prefill), the
# tokens given so far, its number among all, the wait, the prefill, the cached tokens, the worker, its costs, the
# rank's work.
PrefillFields: TypeAlias = tuple[float, float, int, float, float, int, W, WorkerCost, RankWork]
# Of one for decoding: the seconds to join the batch and by which streams and request slow each other down, the streams
# given so far, the number, the prompt's costs if it runs here, what the streams lose by that, and if there is memory.
DecodeFields: TypeAlias = tuple[float, float, int, PrefillFields[W], float, bool]


class Matched(NamedTuple):
    """The number of a prompt's blocks that each cache has, those that it would have to load, and who lends some."""

    blocks: Mapping[Cache, int]
    below: Mapping[Cache, Below]
    lenders: Sequence[Lender] = ()


# A rank with all that its costs are read from, and how many ranks its worker has.
_Rank: TypeAlias = tuple[int, W, WorkerCost, RelativeCost, RankWork, PromptQueue, Cache, int]


class RankCosts:
    """The ranks of lists of workers, and what prompts cost there.

    The lists of most requests are the same tuples, for which the ranks are remembered.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._known: dict[int, tuple[Sequence[Any], list[_Rank[Any]]]] = {}

    def forget(self) -> None:
        """Forgets the lists, since a worker has left."""
        self._known.clear()

    def to_prefill(
        self, workers: Sequence[W], request: RoutingRequest, matched: Matched, now: float
    ) -> list[PrefillFields[W]]:
        """Each rank of each worker, with what the prompt costs there."""
        size, tokens = request.blocks.block_tokens, request.prompt_tokens
        # The last token is always computed.
        most_blocks = (tokens - 1) // size
        have, below, available = matched
        ranks: list[PrefillFields[W]] = []
        for number, worker, cost, relative, work, queue, cache, num_ranks in self._ranks(workers):
            slowness, usual, wait, cached = relative.slowness, relative.usual, 0.0, 0
            if cache in have:
                blocks = have[cache]
                cached = (blocks if blocks < most_blocks else most_blocks) * size
            # As `relative.seconds(computed, cached + computed / 2)`.
            computed = tokens - cached
            prefill = slowness * (usual.base + computed * (usual.rate + (cached + computed / 2) * usual.bend))
            if queue.seconds:  # as `queue.wait_at(now)`
                passed = now - queue.head_since
                wait = queue.seconds - (passed if passed < queue.head_seconds else queue.head_seconds)
            if worker.others_tokens:
                # An estimate of the work that other routers have sent, which the worker has reported.
                wait += worker.others_tokens * slowness * usual.rate / num_ranks
            if worker.wake_seconds:
                wait += worker.wake_seconds + _ASLEEP_SECONDS
            if available or cache in below:
                cached, load = self.plan(cost, request, matched, cache, wait)
                computed = tokens - cached
                prefill = relative.seconds(computed, cached + computed / 2) + load.seconds
            ranks.append((wait + prefill, work.given_tokens, number, wait, prefill, cached, worker, cost, work))
        return ranks

    def lenders(self, groups: Sequence[Sequence[W]], request: RoutingRequest, matched: Matched) -> Sequence[Lender]:
        """Of the ranks of all groups of workers, those that can lend the most of a prompt."""
        ranks = ((cost, cache) for group in groups for _, _, cost, _, _, _, cache, _ in self._ranks(group))
        return lenders(ranks, matched.blocks, matched.below, lambda host: self._load(request, host, 0).seconds)

    def plan(
        self, cost: WorkerCost, request: RoutingRequest, matched: Matched, cache: Cache, wait: float
    ) -> tuple[int, LoadPlan]:
        """The tokens that a worker will not compute, and what it loads for that: what takes the least time together.

        The prompts before it take `wait` seconds.
        """
        own = self._own_plan(cost.prefill, request, matched, cache)
        if not matched.lenders:
            return own.blocks * request.blocks.block_tokens, own.load
        return with_loan(own, cost, matched.lenders, request, wait)

    def _own_plan(self, prefill: RelativeCost, request: RoutingRequest, matched: Matched, cache: Cache) -> OwnPlan:
        size, tokens = request.blocks.block_tokens, request.prompt_tokens
        have = min(matched.blocks.get(cache, 0), (tokens - 1) // size)
        below = matched.below.get(cache)
        if below is None:
            return OwnPlan(have, have, NO_LOAD)
        on_device = max(0, min(have, matched.blocks[cache] - below.host - below.disk))
        on_host = max(0, min(have - on_device, below.host))
        plans = [
            (on_device, NO_LOAD),
            (on_device + on_host, self._load(request, on_host, 0)),
            (have, self._load(request, on_host, have - on_device - on_host)),
        ]

        def seconds(plan: tuple[int, LoadPlan]) -> float:
            computed = tokens - plan[0] * size
            return prefill.seconds(computed, plan[0] * size + computed / 2) + plan[1].seconds

        blocks, load = min(plans, key=seconds)
        return OwnPlan(blocks, on_device, load)

    def _load(self, request: RoutingRequest, host: int, disk: int) -> LoadPlan:
        if not host + disk:
            return NO_LOAD
        priors, size, tokens = self._costs.priors, request.blocks.block_bytes, request.blocks.block_tokens
        loading = host * size / priors.host_bytes_per_second + disk * size / priors.disk_bytes_per_second
        return LoadPlan(host * tokens, disk * tokens, priors.load_base_seconds + loading)

    def to_decode(
        self, workers: Sequence[W], request: RoutingRequest, matched: Matched, now: float, arrivals: float
    ) -> list[DecodeFields[W]]:
        """Each rank of each worker, with what it costs to decode there, and to run the prompt there, too.

        `arrivals` is how many new streams a second all ranks get together: those that come while the prompt runs at
        one are held up for half of it on average.
        """
        here = self.to_prefill(workers, request, matched, now)
        slower = self._costs.priors.stream_seconds * min(request.answer_tokens, _ANSWER_TOKENS)
        block_tokens, tokens, arrivals = request.blocks.block_tokens, request.prompt_tokens, arrivals / len(here) / 2
        ranks: list[DecodeFields[W]] = []
        for rank in here:
            _, _, number, _, prefill, cached, worker, cost, work = rank
            requests, load, entry, has_memory = worker.requests, worker.load, cost.entry, True
            there, total = requests + cost.coming, load.blocks_total
            decode = entry.slowness * entry.usual.base + there * slower
            if total:
                # Those that do not run yet come first, and are taken to be as long as this one.
                waiting = max(0, there - load.running) if there else 0
                if (total - load.blocks_used) * block_tokens < tokens - cached + waiting * tokens:
                    decode += _NO_ROOM_SECONDS * (1 + waiting)
                    has_memory = False
            stall = _STALL_WEIGHT * (requests + arrivals * prefill) * prefill
            ranks.append((decode, work.given_streams, number, rank, stall, has_memory))
        return ranks

    def _ranks(self, workers: Sequence[W]) -> list[_Rank[W]]:
        """All ranks of the workers, in their order."""
        known = self._known.get(id(workers))
        if known is not None and known[0] is workers:
            return known[1]
        costs = [(worker, self._costs.of(worker.record)) for worker in workers]
        ranks = [(worker, cost, work) for worker, cost in costs for work in cost.ranks]
        found: list[_Rank[W]] = [
            (number, worker, cost, cost.prefill, work, work.queue, work.cache, len(cost.ranks))
            for number, (worker, cost, work) in enumerate(ranks)
        ]
        if isinstance(workers, tuple):  # of other sequences the workers may change
            if len(self._known) >= _MOST_LISTS:
                self._known.clear()
            self._known[id(workers)] = workers, found
        return found
