"""Metrics that engines count themselves: preemptions, drafts, the ranks of a group. docs/metrics.md explains each."""

from functools import partial
from typing import Protocol

from runtime.telemetry.metrics import counter, gauge, info
from services.engines.kv_events import KvTier

PREEMPTIONS = counter(
    "baton_preemptions_total", "Requests that gave their blocks to older ones and are computed again."
)
RETAINED_BLOCKS_EVICTED = counter(
    "baton_retained_blocks_evicted_total",
    "Cached blocks that were evicted before the end of the time for which a request retains them.",
)
RECOVERED_BLOCKS = counter(
    "baton_kv_recovered_blocks_total",
    "Blocks of the prefix cache that an earlier process of this worker left in kept memory: used again, or damaged.",
    ["outcome"],
)
RECOVERED_DECODES = counter(
    "baton_recovered_decodes_total",
    "Decodes that an earlier process of this worker left: with whole KV, a part of it, or as ids; damaged records.",
    ["outcome"],
)
for _outcome in ("whole", "cut", "ids", "damaged"):
    RECOVERED_DECODES.labels(_outcome)  # a series that begins at one shows no increase
DRAFTED_TOKENS = counter("baton_drafted_tokens_total", "Tokens that speculation guessed.")
ACCEPTED_TOKENS = counter("baton_accepted_draft_tokens_total", "Guessed tokens that became part of an answer.")

TIER_BLOCKS = gauge("baton_kv_tier_blocks", "Blocks in a tier below the pool.", ["tier"])
TIER_CAPACITY = gauge(
    "baton_kv_tier_capacity_blocks", "Blocks that a tier has room for; 0 while it is out of use.", ["tier"]
)
TIER_BYTES = counter(
    "baton_kv_tier_bytes_total",
    "Bytes that went into a tier from above (out) and back from it (in).",
    ["tier", "direction"],
)
TIER_HIT_TOKENS = counter("baton_kv_tier_hit_tokens_total", "Tokens that were loaded and not computed.", ["tier"])
FAILED_LOADS = counter("baton_kv_failed_loads_total", "Loads that ended early; the rest was computed.", ["reason"])
DAMAGED_BLOCKS = counter("baton_kv_damaged_blocks_total", "Blocks whose seal did not match after a load.", ["tier"])
TIER_FAILURES = counter("baton_kv_tier_failures_total", "Reads and writes of a tier that failed.", ["tier"])

RANK = info("baton_rank", "The rank of this process in a group over several hosts.")
RANK_READY = gauge("baton_rank_ready", "1 while the rank's group is ready, 0 before and afterwards.")
RANK_STEPS = counter("baton_rank_steps_total", "Steps that a rank above 0 has computed.")
RANK_STEP_TOKENS = counter("baton_rank_step_tokens_total", "Tokens of steps of a rank above 0, padding included.")


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
