"""The router's belief about prefix caches that are not reported, from its own decisions."""

from collections import Counter
from itertools import pairwise

from support.clock import ManualClock
from support.router.worker_views import worker

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import cluster_service_pb2, generate_pb2
from router.routing.policy import Candidates, KnownLoras, PromptBlocks, RoutingRequest
from router.routing.prefix import prefix_caches
from router.routing.prefix.predicted import PredictedSeconds
from router.routing.prefix.prefix_caches import Cache, PrefixCaches

SIZE, SHARED = 16, list(range(1, 251))


class Idle:
    """A worker as the policy sees it, which reports nothing of its cache and never has anything to do."""

    problem = embedding_layout = encoder = ""
    requests = waiting_tokens = others_tokens = 0
    wake_seconds = 0.0
    token_seconds = None
    loras = KnownLoras()
    load = cluster_service_pb2.WorkerLoad()

    def __init__(self, worker_id: str) -> None:
        self.record = worker(worker_id)


def request(number: int) -> RoutingRequest:
    """A prompt of 250 blocks that all requests share and one of its own."""
    keys = [*SHARED, 10_000 + number]
    prompt = prompt_pb2.Prompt(token_ids=range(len(keys) * SIZE))
    blocks = PromptBlocks(keys, SIZE, 4096)
    return RoutingRequest("demo", prompt, generate_pb2.RoutingOptions(), answer_tokens=8, blocks=blocks)


def place(policy: PredictedSeconds, workers: list[Idle], number: int, cached_tokens: int) -> str:
    """The place of a request, and the part of its prompt that was cached there."""
    placement = policy.choose(request(number), Candidates(workers))
    placement.progress.first_token(None)
    placement.progress.found_cached(cached_tokens)
    placement.progress.close()
    return placement.decode.record.worker_id


def test_a_prefix_is_estimated_to_be_where_it_was_sent() -> None:
    clock = ManualClock()
    policy, workers = PredictedSeconds(clock=clock), [Idle(name) for name in "abc"]
    placed = [place(policy, workers, number, 250 * SIZE) for number in range(30)]
    assert len(set(placed)) == 1
    assert policy.cache_view(workers[0].record.process) == generate_pb2.CACHE_VIEW_ESTIMATED


def test_workers_without_a_cache_share_the_requests_of_a_prefix() -> None:
    """The one that was sent the prefix first would get all others otherwise, and compute it for each of them."""
    policy, workers = PredictedSeconds(clock=ManualClock()), [Idle(name) for name in "abc"]
    placed = [place(policy, workers, number, 0) for number in range(90)]
    assert max(Counter(placed[30:]).values()) <= 22
    assert policy.caches.match(SHARED) == {}
    # One that has something after all is believed again.
    process = f"{place(policy, workers, 100, 250 * SIZE)}@1"
    assert policy.caches.match(SHARED) == {Cache(process): 250}


def test_what_is_estimated_is_bounded_and_the_oldest_goes_first() -> None:
    caches, cache = PrefixCaches(), Cache("w@1")
    steps = range(0, 2 * prefix_caches._MOST_ESTIMATED + 1, 1 << 14)
    for start, end in pairwise(steps):
        caches.expect(cache, range(start, end), 0.0)
    assert caches.num_blocks(cache) == prefix_caches._MOST_ESTIMATED
    assert caches.match([steps[-1] - 1]) == {cache: 1}
    assert caches.match([0]) == {}
