"""The metrics of a router. docs/metrics.md says what each one means."""

from collections import Counter as Count
from collections.abc import Iterable

from prometheus_client import Counter, Gauge, Histogram

from rpc.errors import DeadlineUnreachable, Overloaded, QuotaExceeded
from rpc.frequent_histogram import FrequentHistogram
from rpc.metrics import REGISTRY

_CLASS = ("model", "request_class")
_SECONDS = (0.0001, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0)
WORKER_STATES = ("ready", "unhealthy", "draining")
ROLES = ("encode", "prefill", "decode")

REQUESTS = Counter(
    "baton_router_requests_total",
    "Requests that have ended.",
    [*_CLASS, "outcome", "reason"],
    registry=REGISTRY,
)
RUNNING = Gauge("baton_router_running_requests", "Requests that are running.", registry=REGISTRY)
WAITING = Gauge(
    "baton_router_waiting_requests", "Requests that wait until they are let in to the workers.", registry=REGISTRY
)
TTFT = Histogram(
    "baton_router_time_to_first_token_seconds",
    "From a request's arrival to its first token.",
    _CLASS,
    buckets=(
        *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
        *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    ),
    registry=REGISTRY,
)
INTER_TOKEN_LATENCY = FrequentHistogram(
    "baton_router_inter_token_latency_seconds",
    "From one token to the next; tokens that come together share the time since those before them.",
    _CLASS,
    (
        *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04),
        *(0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    ),
    REGISTRY,
)
REQUEST_SECONDS = Histogram(
    "baton_router_request_seconds",
    "From a request's arrival to its end, of those that ended well.",
    _CLASS,
    buckets=(
        *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.5, 10.0, 15.0),
        *(20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 240.0, 480.0, 960.0),
    ),
    registry=REGISTRY,
)
STAGE_SECONDS = Histogram(
    "baton_router_stage_seconds",
    "What each stage took of a request that ended well, as its ledger says.",
    [*_CLASS, "stage"],
    # Fewer than elsewhere: there are twelve stages of four classes of each model.
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0),
    registry=REGISTRY,
)
QUEUE_SECONDS = Histogram(
    "baton_router_queue_seconds",
    "How long requests waited until they were let in to the workers; 0 for those let in at once.",
    buckets=_SECONDS,
    registry=REGISTRY,
)
TOKENS = Counter(
    "baton_router_tokens_total",
    "Tokens of ended requests: of prompts, of these found in a prefix cache, of media, and of answers.",
    [*_CLASS, "kind"],
    registry=REGISTRY,
)
RETRIES = Counter(
    "baton_router_retries_total", "Attempts after a worker had failed a request.", ["stage"], registry=REGISTRY
)
MIGRATIONS = Counter(
    "baton_router_migrations_total",
    "Requests that went on at another worker than the one that they were placed on.",
    ["stage"],
    registry=REGISTRY,
)
REFUSALS = Counter(
    "baton_router_refusals_total", "Requests that were not let in to the workers.", ["reason"], registry=REGISTRY
)
WORKERS = Gauge(
    "baton_router_workers",
    "Workers that are registered, as this router sees them.",
    ["worker_role", "state"],
    registry=REGISTRY,
)
EMBEDDING_CACHE_HITS = Counter(
    "baton_embedding_cache_hits_total", "Media whose embedding was in the cache.", registry=REGISTRY
)
EMBEDDING_CACHE_MISSES = Counter(
    "baton_embedding_cache_misses_total", "Media whose embedding was not in the cache.", registry=REGISTRY
)
EMBEDDING_CACHE_BYTES = Gauge(
    "baton_embedding_cache_bytes", "Embeddings in the cache, here or leased on encode workers.", registry=REGISTRY
)
EMBEDDING_CACHE_EVICTIONS = Counter(
    "baton_embedding_cache_evictions_total", "Embeddings that have left the cache.", ["reason"], registry=REGISTRY
)


def observe_workers(workers: Iterable[tuple[str, str]]) -> None:
    """Counts the workers that there are, each one as its role and its state, once for every role that it has."""
    counts = Count(workers)
    for role in ROLES:
        for state in WORKER_STATES:
            WORKERS.labels(role, state).set(counts[role, state])


def _begin_at_zero() -> None:
    """What has never happened is zero and not unknown: otherwise the first time is no increase."""
    for stage in ROLES:
        RETRIES.labels(stage)
    for stage in ("prefill", "decode"):
        MIGRATIONS.labels(stage)
    for kind in (DeadlineUnreachable, Overloaded, QuotaExceeded):
        REFUSALS.labels(kind.reason)
    for reason in ("closed", "draining", "full", "idle", "lost", "relief"):
        EMBEDDING_CACHE_EVICTIONS.labels(reason)
    observe_workers(())


_begin_at_zero()
