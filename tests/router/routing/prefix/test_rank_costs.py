"""The cost of a prompt at each place that could run it."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
from support.clock import ManualClock

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import cluster_service_pb2, generate_pb2
from discovery.record import WorkerRecord
from router.routing.policy import NO_LOAD, KnownLoras, LoadPlan, Prediction, PromptBlocks, RoutingRequest
from router.routing.prefix.cost import Costs, Priors, RelativeCost, WorkerCost
from router.routing.prefix.forecast import Forecast
from router.routing.prefix.prefix_caches import Below, Cache, PrefixCaches
from router.routing.prefix.rank_costs import Matched, PrefillFields, RankCosts
from router.routing.prefix.work import RankWork

SIZE = 16
COSTS = Priors(prefill_base_seconds=0.5, prefill_tokens_per_second=100.0, entry_seconds=0.25, stream_seconds=0.001)


@dataclass(frozen=True)
class Seen:
    """A worker as the policy sees it."""

    record: WorkerRecord
    requests: int = 0
    others_tokens: int = 0
    load: cluster_service_pb2.WorkerLoad = field(default_factory=cluster_service_pb2.WorkerLoad)
    problem: str = ""
    waiting_tokens: int = 0
    embedding_layout: str = ""
    encoder: str = ""
    token_seconds: float | None = None
    wake_seconds: float = 0.0
    loras: KnownLoras = field(default_factory=KnownLoras)


class PrefillRank(NamedTuple):
    """The names of PrefillFields."""

    first_token: float
    given_tokens: float
    number: int
    wait: float
    prefill: float
    cached_tokens: int
    worker: Seen
    cost: WorkerCost
    work: RankWork

    @property
    def rank(self) -> int:
        return self.work.cache.rank


class DecodeRank(NamedTuple):
    """The names of DecodeFields."""

    decode: float
    given_streams: float
    number: int
    here: PrefillFields[Seen]
    stall: float
    has_memory: bool


def worker(worker_id: str, ranks: int = 1, requests: int = 0, others_tokens: int = 0, **load: int) -> Seen:
    record = WorkerRecord(worker_id, 1, "x:1", ("decode",), "m", "e", "a" * 64, 10_000, data_parallel_ranks=ranks)
    return Seen(record, requests, others_tokens, cluster_service_pb2.WorkerLoad(**load))


def request(tokens: int, answer_tokens: int = 100) -> RoutingRequest:
    blocks = PromptBlocks(list(range(tokens // SIZE)), SIZE, 4096)
    prompt = prompt_pb2.Prompt(token_ids=range(tokens))
    return RoutingRequest("m", prompt, generate_pb2.RoutingOptions(), answer_tokens=answer_tokens, blocks=blocks)


def decoding(one: Seen, tokens: int = 1600, cached_blocks: int = 0, costs: Costs | None = None) -> DecodeRank:
    """The place that a worker of one rank is for decoding, with 0.001 s more of each token for each stream."""
    matched = {Cache(one.record.process): cached_blocks}
    places = RankCosts(costs or Costs(COSTS))
    (fields,) = places.to_decode([one], request(tokens), Matched(matched, {}), now=0.0, arrivals=0.0)
    return DecodeRank(*fields)


def computing(
    workers: list[Seen],
    matched: dict[Cache, int],
    costs: Costs | None = None,
    now: float = 0.0,
    below: dict[Cache, Below] | None = None,
) -> list[PrefillRank]:
    """The places that the workers' ranks are for a prompt of 1600 tokens."""
    found = Matched(matched, below or {})
    places = RankCosts(costs or Costs(COSTS)).to_prefill(workers, request(1600), found, now)
    return [PrefillRank(*fields) for fields in places]


def test_the_tokens_that_are_not_cached_are_computed_and_always_the_last_one() -> None:
    matched = {Cache("half@1"): 50, Cache("whole@1"): 100}
    workers = [worker("none"), worker("half"), worker("whole")]
    places = computing(workers, matched)
    assert [place.cached_tokens for place in places] == [0, 800, 1584]
    assert [place.prefill for place in places] == pytest.approx([16.5, 8.5, 0.66])
    assert [place.first_token for place in places] == [place.prefill for place in places]


@pytest.mark.parametrize(
    ("host_rate", "disk_rate", "cached", "prefill"),
    [
        # Of 100 blocks 20 are in the pool, 50 in host memory and 30 on disk. Computing one takes 0.16 s.
        (4096.0, 4096.0, 320, 0.5 + 12.8),
        (4096e3, 4096e3, 1600 - 16, 0.5 + 0.16 + 0.079),
        (4096e3, 4096.0 * 5, 1600 - 16 - 29 * 16, 0.5 + (16 + 29 * 16) / 100 + 0.05),
        (4096.0 * 5, 4096e3, 1600 - 16, 0.5 + 0.16 + 10.0 + 0.029),
    ],
)
def test_of_what_is_below_the_pool_only_what_is_sooner_loaded_than_computed_is_loaded(
    host_rate: float, disk_rate: float, cached: int, prefill: float
) -> None:
    priors = replace(COSTS, load_base_seconds=0.0, host_bytes_per_second=host_rate, disk_bytes_per_second=disk_rate)
    cache = Cache("w@1")
    [place] = computing([worker("w")], {cache: 100}, Costs(priors), below={cache: Below(50, 30)})
    assert place.cached_tokens == cached
    assert place.prefill == pytest.approx(prefill)


def test_every_rank_is_a_place_with_a_cache_and_a_queue_of_its_own() -> None:
    clock, one = ManualClock(), worker("w", ranks=3)
    costs = Costs(COSTS, clock)
    rank = costs.of(one.record).ranks[1]
    costs.shares.give(rank, rank, 400, 7.0)
    places = computing([one], {Cache("w@1", 2): 10}, costs, clock())
    assert [place.rank for place in places] == [0, 1, 2]
    assert [place.cached_tokens for place in places] == [0, 0, 160]
    assert [place.wait for place in places] == [0.0, 7.0, 0.0]


def test_prompts_of_other_routers_count_as_wait_and_are_spread_over_the_ranks() -> None:
    workers = [worker("w", ranks=2, others_tokens=400)]
    places = computing(workers, {})
    assert [place.wait for place in places] == pytest.approx([2.0, 2.0])


def test_streams_that_run_or_will_come_slow_each_other_down() -> None:
    costs, one = Costs(COSTS), worker("w", requests=3)
    costs.of(one.record).coming = 2
    assert decoding(one, costs=costs).decode == pytest.approx(0.25 + 5 * 0.1)


def test_a_prompt_on_a_decode_worker_costs_its_streams_twice_the_time_that_it_takes() -> None:
    place = decoding(worker("w", requests=3))
    assert place.stall == pytest.approx(2 * 3 * 16.5)
    assert decoding(worker("w")).stall == 0.0


@pytest.mark.parametrize(
    ("used", "cached_blocks", "waiting", "has_memory", "seconds"),
    [
        (100, 0, 0, True, 0.0),
        (101, 0, 0, False, 1.0),
        (101, 1, 0, True, 0.0),
        (0, 0, 1, True, 0.0),
        (1, 0, 1, False, 2.0),
    ],
)
def test_a_decode_worker_without_memory_for_the_prompt_and_those_before_it_has_no_room(
    used: int, cached_blocks: int, waiting: int, has_memory: bool, seconds: float
) -> None:
    one = worker("w", requests=waiting, blocks_total=200, blocks_used=used)
    place = decoding(one, cached_blocks=cached_blocks)
    assert place.has_memory == has_memory
    assert place.decode == pytest.approx(0.25 + waiting * 0.1 + seconds)


def test_what_a_prompt_loaded_is_not_taken_from_the_time_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[float, float, float]] = []
    add = RelativeCost.add

    def adding(cost: RelativeCost, amount: float, seconds: float, context: float = 0.0) -> None:
        measured.append((amount, seconds, context))
        add(cost, amount, seconds, context)

    monkeypatch.setattr(RelativeCost, "add", adding)
    clock, one = ManualClock(), worker("a")
    costs, caches = Costs(COSTS, clock), PrefixCaches(clock)

    def placed(cached_tokens: int, load: LoadPlan) -> Forecast[Seen]:
        prediction = Prediction(
            None, one, 0.0, 8.0, 0.0, 0.0, 0.0, cached_tokens, 1600 - cached_tokens, True, load=load
        )
        return Forecast(caches, costs, request(1600), prediction, {}, clock)

    first, second = placed(0, NO_LOAD), placed(800, LoadPlan(800, 0, 5.0))
    clock.advance(10.0)
    first.first_token(0)
    clock.advance(6.0)
    second.first_token(800)
    assert measured == [(1600, 10.0, 800.0), (800, 1.0, 1200.0)]


def test_a_model_that_sleeps_costs_the_time_to_wake_and_what_it_displaces() -> None:
    awake, asleep = worker("awake"), replace(worker("asleep"), wake_seconds=2.0)
    seconds = [
        PrefillRank(*fields).wait
        for fields in RankCosts(Costs(COSTS)).to_prefill((awake, asleep), request(64), Matched({}, {}), now=0.0)
    ]
    assert seconds == [0.0, 3.0]
