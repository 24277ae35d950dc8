"""Tiers in simulated time: the pool, the directory, the rates and the router's policy are real."""

from functools import cache

import pytest

from benchmarks.routing.simulated.clock import Time
from benchmarks.tiers.cluster import INFINITE, Cluster, Policy
from benchmarks.tiers.traffic import Agents
from benchmarks.tiers.worker import Hardware

SECONDS, WARM_SECONDS, SESSIONS, CHATS = 400.0, 150.0, 40, 20


@cache
def run(policy: Policy, share: float = 1.0) -> Cluster:
    """Agents and chats, with pools of this share of what is live."""
    time = Time()
    traffic = Agents(time, 3, SESSIONS, CHATS, SECONDS)
    live = sorted(run(INFINITE).live_blocks) if policy is not INFINITE else [0]
    pool = 10**6 if policy is INFINITE else int(live[len(live) // 2] * share / 4)
    cluster = Cluster(time, policy, Hardware(), pool, WARM_SECONDS)
    traffic.cluster = cluster
    time.run()
    cluster.live_blocks = traffic.live_blocks
    return cluster


HOST, ENDS = Policy("host", host=2), Policy("host and end", host=2, ends=True)


@pytest.mark.parametrize("policy", [HOST, ENDS])
def test_host_memory_saves_most_of_what_the_pool_alone_computes_again(policy: Policy) -> None:
    alone, kept, infinite = run(Policy("pool alone"), 0.25), run(policy, 0.25), run(INFINITE)
    assert kept.measured.hit > alone.measured.hit + 0.1
    assert kept.measured.hit > infinite.measured.hit - 0.08
    assert kept.measured.quantile(0.9) < 0.7 * alone.measured.quantile(0.9)


def test_fewer_blocks_go_down_in_vain_if_sessions_say_that_they_end() -> None:
    assert run(ENDS, 0.25).unread < run(HOST, 0.25).unread
