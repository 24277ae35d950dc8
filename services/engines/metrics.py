"""Metrics that engines count themselves: preemptions, drafts, the ranks of a group. docs/metrics.md explains each."""

from functools import partial
from typing import Protocol

from prometheus_client import Counter, Gauge, Info

from runtime.metrics import REGISTRY
from services.engines.kv_events import KvTier

PREEMPTIONS = Counter(
    "baton_preemptions_total",
    "Requests that gave their blocks to older ones and are computed again.",
    registry=REGISTRY,
)
RETAINED_BLOCKS_EVICTED = Counter(
    "baton_retained_blocks_evicted_total",
    "Cached blocks that were evicted before the end of the time for which a request retains them.",
    registry=REGISTRY,
)
RECOVERED_BLOCKS = Counter(
    "baton_kv_recovered_blocks_total",
    "Blocks of the prefix cache that an earlier process of this worker left in kept memory: used again, or damaged.",
    ["outcome"],
    registry=REGISTRY,
)
DRAFTED_TOKENS = Counter("baton_drafted_tokens_total", "Tokens that speculation guessed.", registry=REGISTRY)
ACCEPTED_TOKENS = Counter(
    "baton_accepted_draft_tokens_total", "Guessed tokens that became part of an answer.", registry=REGISTRY
)

TIER_BLOCKS = Gauge("baton_kv_tier_blocks", "Blocks in a tier below the pool.", ["tier"], registry=REGISTRY)
TIER_CAPACITY = Gauge(
    "baton_kv_tier_capacity_blocks",
    "Blocks that a tier has room for; 0 while it is out of use.",
    ["tier"],
    registry=REGISTRY,
)
TIER_BYTES = Counter(
    "baton_kv_tier_bytes_total",
    "Bytes that went into a tier from above (out) and back from it (in).",
    ["tier", "direction"],
    registry=REGISTRY,
)
TIER_HIT_TOKENS = Counter(
    "baton_kv_tier_hit_tokens_total", "Tokens that were loaded and not computed.", ["tier"], registry=REGISTRY
)
FAILED_LOADS = Counter(
    "baton_kv_failed_loads_total", "Loads that ended early; the rest was computed.", ["reason"], registry=REGISTRY
)
DAMAGED_BLOCKS = Counter(
    "baton_kv_damaged_blocks_total", "Blocks whose seal did not match after a load.", ["tier"], registry=REGISTRY
)
TIER_FAILURES = Counter(
    "baton_kv_tier_failures_total", "Reads and writes of a tier that failed.", ["tier"], registry=REGISTRY
)

RANK = Info("baton_rank", "The rank of this process in a group over several hosts.", registry=REGISTRY)
RANK_READY = Gauge("baton_rank_ready", "1 while the rank's group is ready, 0 before and afterwards.", registry=REGISTRY)
RANK_STEPS = Counter("baton_rank_steps_total", "Steps that a rank above 0 has computed.", registry=REGISTRY)
RANK_STEP_TOKENS = Counter(
    "baton_rank_step_tokens_total",
    "Tokens of steps of a rank above 0, padding included.",
    registry=REGISTRY,
)


def introduce_rank(rank: int, size: int, leader: str, model: str) -> None:
    """Sets the info metric of a rank of a group over several hosts."""
    RANK.info({"rank": str(rank), "size": str(size), "leader": leader, "model": model})


class TierSizes(Protocol):
    """The sizes of the tiers below a pool."""

    def total(self, tier: KvTier) -> int: ...

    def used(self, tier: KvTier) -> int: ...


def watch_tiers(sizes: TierSizes) -> None:
    """Sets the gauges of tiers to those of these from now on."""
    for tier in (KvTier.HOST, KvTier.DISK):
        TIER_BLOCKS.labels(tier.name.lower()).set_function(partial(sizes.used, tier))
        TIER_CAPACITY.labels(tier.name.lower()).set_function(partial(sizes.total, tier))
