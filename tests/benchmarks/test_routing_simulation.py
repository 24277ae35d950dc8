"""Routing policies on traces in simulated time: the policies and their indexes are real."""

import random
from functools import cache

import pytest
from support.sampled import sampled

from benchmarks.routing.closed_loop import ClosedLoop
from benchmarks.routing.simulation import Plan, Result, simulate
from devtools.bench.traces import TracedRequest, generate_trace, ideal_hit_rate

REQUESTS = 1500


@cache
def trace(seed: int) -> tuple[TracedRequest, ...]:
    return tuple(generate_trace(seed, REQUESTS, 600.0))


@cache
def result(policy: str, seed: int = 1, cache_share: float = 0.2, routers: int = 1) -> Result:
    return simulate(policy, seed, trace(seed), Plan(cache_share=cache_share, routers=routers))


@pytest.mark.parametrize("seed_and_cache_share", sampled([(1, 0.2), (2, 0.02)], [(1, 0.2)]))
def test_predicted_seconds_are_quicker_than_any_other_policy(seed_and_cache_share: tuple[int, float]) -> None:
    seed, cache_share = seed_and_cache_share
    best = result("predicted_seconds", seed, cache_share)
    for policy in ("least_loaded", "round_robin", "random"):
        other = result(policy, seed, cache_share)
        assert best.p50 < 0.7 * other.p50
        assert best.p90 < 0.6 * other.p90
        assert best.p99 < 0.8 * other.p99


@pytest.mark.parametrize("seed", sampled([1, 2], [1]))
def test_the_hit_rate_is_nearly_that_of_one_endless_cache(seed: int) -> None:
    assert result("predicted_seconds", seed).hit_rate >= 0.8 * ideal_hit_rate(trace(seed))


@pytest.mark.parametrize("seed", sampled([1, 2], [1]))
def test_the_busiest_prefill_worker_does_little_more_than_the_mean(seed: int) -> None:
    assert result("predicted_seconds", seed).busiest <= 1.25


@pytest.mark.parametrize("seed", sampled([1, 2], [1]))
def test_the_time_to_first_token_is_predicted(seed: int) -> None:
    assert result("predicted_seconds", seed).prediction_error < 0.25


def test_two_routers_that_do_not_talk_to_each_other_find_nearly_as_much_in_the_caches() -> None:
    assert result("predicted_seconds", routers=2).hit_rate >= 0.95 * result("predicted_seconds").hit_rate


def hot_prefix(share: float) -> list[TracedRequest]:
    """Prompts of which a share begin with the same eight blocks; all end with one of their own."""
    source = random.Random(1)
    requests = []
    for number in range(REQUESTS):
        start = tuple(range(8)) if source.random() < share else tuple(1000 + number * 8 + index for index in range(8))
        requests.append(TracedRequest(number * 0.1, (*start, 1_000_000 + number), 9 * 512, 100))
    return requests


def test_a_prefix_of_nine_requests_in_ten_neither_herds_nor_starves_the_others() -> None:
    plan = Plan(load=1.6)  # a single worker could not compute even the parts that are not shared
    hot = simulate("predicted_seconds", 1, hot_prefix(0.9), plan)
    load = simulate("least_loaded", 1, hot_prefix(0.9), plan)
    assert hot.busiest <= 1.3
    assert hot.hit_rate >= 0.95 * ideal_hit_rate(hot_prefix(0.9))
    assert hot.p99 <= load.p99


@pytest.mark.parametrize(
    "load", sampled([(16, 1024), (64, 1024), (16, 4000), (64, 200)], [(64, 1024), (16, 1024), (64, 200)])
)
def test_prompts_are_handed_over_when_that_is_quicker_however_many_are_computed_in_one_step(
    load: tuple[int, int],
) -> None:
    """Decode workers that had computed several prompts at a time seemed to do so in no time, and got nearly all."""
    at_once, tokens = load
    apart, whole = (ClosedLoop().run(topology, at_once, tokens, 320) for topology in ("apart", "whole"))
    loop = ClosedLoop()
    loop.run("whole", at_once, tokens, 320)
    found = loop.run("automatic", at_once, tokens, 320)
    assert found.tokens_per_second >= 0.97 * max(apart.tokens_per_second, whole.tokens_per_second)
