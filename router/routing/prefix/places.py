"""What a prompt costs at each data-parallel rank of the workers that could run it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from router.routing.policy import RoutingRequest, W
from router.routing.prefix.cost import Costs, WorkerCost
from router.routing.prefix.prefix_caches import Cache
from router.routing.prefix.work import RankWork

# The longest answer that counts where it is decoded: it may be much shorter than the limit.
_ANSWER_TOKENS = 128
# For a decode worker without room for the prompt, and for each that waits there already: until others have ended.
_NO_ROOM_SECONDS = 1.0
# A second in which a running stream stands still counts as so many seconds of a request that has not begun. Its client
# is reading, and a queue in front of prefill workers is seen by the policy, unlike a pause of the next streams.
_STALL_WEIGHT = 2.0


@dataclass(slots=True, eq=False)  # not frozen: each request has one for every worker
class Place(Generic[W]):
    """A rank of a worker, and what the prompt costs there, in seconds.

    `first_token` is `wait` and `prefill`. For decode workers `decode` is the time to join the batch and how much the
    streams there and the request slow each other down, and `stall` what those streams lose if the prompt runs there.
    """

    worker: W
    cost: WorkerCost
    work: RankWork
    cached_tokens: int
    wait: float
    prefill: float
    first_token: float
    decode: float = 0.0
    stall: float = 0.0
    has_room: bool = True  # for the prompt, on a decode worker

    @property
    def rank(self) -> int:
        """Which of the worker's ranks it is."""
        return self.work.cache.rank

    def late(self, arrival: float) -> float:
        """How long a stream that arrives after so many seconds is held up by the prompts that run here until then."""
        held_up = self.wait - arrival
        return held_up if held_up > 0.0 else 0.0


def places_of(
    workers: Sequence[W], request: RoutingRequest, matched: Mapping[Cache, int], costs: Costs, now: float
) -> list[Place[W]]:
    """Each rank of each worker, with what the prompt costs there."""
    size, tokens = request.blocks.block_tokens, request.prompt_tokens
    # The last token is always computed.
    most_blocks = (tokens - 1) // size
    found = []
    for worker in workers:
        cost = costs.of(worker.record)
        ranks, slowness, usual = cost.ranks, cost.prefill.slowness, cost.prefill.usual
        base, rate = slowness * usual.base, slowness * usual.rate
        # An estimate of the work that other routers have sent, which the worker has reported.
        others = worker.others_tokens * rate / len(ranks)
        for work in ranks:
            cached = 0
            if work.cache in matched:
                blocks = matched[work.cache]
                cached = (blocks if blocks < most_blocks else most_blocks) * size
            wait, prefill = work.queue.wait_at(now) + others, base + (tokens - cached) * rate
            found.append(Place(worker, cost, work, cached, wait, prefill, wait + prefill))
    return found


def add_decoding(places: Sequence[Place[W]], request: RoutingRequest, stream_seconds: float, arrivals: float) -> None:
    """Adds `decode` and `stall` to places that decode.

    `stream_seconds` is what one more stream adds to each token of the others, `arrivals` how many new streams a second
    each place gets: those that come while the prompt runs there are held up for half of it on average.
    """
    slower = stream_seconds * min(request.answer_tokens, _ANSWER_TOKENS)
    block_tokens, tokens = request.blocks.block_tokens, request.prompt_tokens
    for place in places:
        worker, prefill, cost = place.worker, place.prefill, place.cost
        requests, load = worker.requests, worker.load
        there = requests + cost.coming
        place.decode = cost.entry.slowness * cost.entry.usual.base + there * slower
        total, waiting = load.blocks_total, there - load.running
        # Those that do not run yet come first, and are taken to be as long as this one.
        needed = tokens - place.cached_tokens + waiting * tokens if waiting > 0 else tokens - place.cached_tokens
        if total and (total - load.blocks_used) * block_tokens < needed:
            place.decode += _NO_ROOM_SECONDS * (1 + max(0, waiting))
            place.has_room = False
        place.stall = _STALL_WEIGHT * (requests + arrivals * prefill / 2) * prefill
