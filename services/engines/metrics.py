"""Metrics that engines count themselves: preemptions, drafts, the ranks of a group. docs/metrics.md explains each."""

from prometheus_client import Counter, Gauge, Info

from runtime.metrics import REGISTRY

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
DRAFTED_TOKENS = Counter("baton_drafted_tokens_total", "Tokens that speculation guessed.", registry=REGISTRY)
ACCEPTED_TOKENS = Counter(
    "baton_accepted_draft_tokens_total", "Guessed tokens that became part of an answer.", registry=REGISTRY
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
