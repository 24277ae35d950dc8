"""The metrics of a router, described in docs/metrics.md."""

from collections import Counter as Count
from collections.abc import Iterable

from baton.errors import DeadlineUnreachable, Overloaded, QuotaExceeded, QuotaUnavailable
from baton.inference.v1 import generate_pb2
from engine_protocol.roles import roles
from runtime.telemetry.frequent_metrics import FrequentCounter, FrequentHistogram
from runtime.telemetry.metrics import REGISTRY, counter, gauge

_CLASS = ("model", "request_class")
_SECONDS = (0.0001, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0)
RESUMED = ("adopted", "computed_again", "lost")
WORKER_STATES = ("ready", "unhealthy", "draining")

REQUESTS = FrequentCounter(
    "baton_router_requests_total", "Requests that have ended.", [*_CLASS, "outcome", "reason"], REGISTRY
)
RUNNING = FrequentCounter(
    "baton_router_running_requests", "Requests that are running.", (), REGISTRY, is_gauge=True
).labels()
WAITING = gauge("baton_router_waiting_requests", "Requests that wait for admission.")
WAITING_TENANTS = gauge("baton_router_waiting_tenants", "Tenants with requests that wait.")
LONGEST_TENANT_WAIT = gauge(
    "baton_router_longest_tenant_wait_seconds", "The longest time for which a tenant's next request has waited."
)
STARVING_TENANTS = gauge(
    "baton_router_starving_tenants",
    "Tenants that have waited for over ten seconds, and got less than half of an even share in the last minute.",
)
QUOTA_FALLBACKS = counter("baton_router_quota_fallbacks_total", "Uses of a quota that no router lent.", ["outcome"])
PEERS = gauge("baton_router_peers", "Routers that share quotas and places, this one included.")
TTFT = FrequentHistogram(
    "baton_router_time_to_first_token_seconds",
    "From a request's arrival to its first token.",
    _CLASS,
    (
        *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
        *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    ),
    REGISTRY,
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
REQUEST_SECONDS = FrequentHistogram(
    "baton_router_request_seconds",
    "From the arrival of a successful request to its end.",
    _CLASS,
    (
        *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.5, 10.0, 15.0),
        *(20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 240.0, 480.0, 960.0),
    ),
    REGISTRY,
)
STAGE_SECONDS = FrequentHistogram(
    "baton_router_stage_seconds",
    "The time that each stage of a successful request took.",
    [*_CLASS, "stage"],
    # Fewer than elsewhere: there are twelve stages of four classes of each model.
    (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0),
    REGISTRY,
)
QUEUE_SECONDS = FrequentHistogram(
    "baton_router_queue_seconds",
    "How long requests waited for admission; 0 for those admitted at once.",
    (),
    _SECONDS,
    REGISTRY,
).labels()
TOKENS = FrequentCounter(
    "baton_router_tokens_total",
    "Tokens of ended requests: of prompts, of these found in a prefix cache, of media, and of answers.",
    [*_CLASS, "kind"],
    REGISTRY,
)
RETRIES = counter("baton_router_retries_total", "Attempts after a worker had failed a request.", ["stage"])
MIGRATIONS = counter(
    "baton_router_migrations_total",
    "Requests that continued on another worker than the one they were placed on.",
    ["stage"],
)
MOVES = counter(
    "baton_router_moves_total",
    "Decodes that were to go on on another worker with their KV: moved, returned to where they were, recomputed, or not"
    " moved at all.",
    ["outcome"],
)
MOVE_PAUSE_SECONDS = FrequentHistogram(
    "baton_router_move_pause_seconds",
    "How long a decode that was moved gave no token: from its last one there to the first one here.",
    (),
    _SECONDS,
    REGISTRY,
).labels()
RESUMPTIONS = counter(
    "baton_router_resumptions_total",
    "Answers that a client asked to go on with: taken over from a worker, computed again, or lost.",
    ["result"],
)
REATTACHMENTS = counter(
    "baton_router_reattachments_total",
    "Kept answers whose worker was lost: attached in its process again or in the next one, or lost there too.",
    ["result"],
)
STORED_RESPONSES = gauge("baton_router_stored_responses", "Responses of OpenAI's API that this router keeps in memory.")
STORED_RESPONSE_BYTES = gauge("baton_router_stored_response_bytes", "What these responses take.")
RECORDS = counter("baton_router_records_total", "Requests that were recorded.", ["cause"])
RECORDS_DROPPED = counter(
    "baton_router_records_dropped_total",
    "Records that were not kept, or no longer than until others needed their memory.",
    ["cause"],
)
RECORD_BYTES = gauge("baton_router_record_bytes", "What the records in memory take.")
REFUSALS = counter("baton_router_refusals_total", "Requests that were refused admission to the workers.", ["reason"])
WORKERS = gauge(
    "baton_router_workers", "Workers that are registered, as this router sees them.", ["worker_role", "state"]
)
UNPAIRED_WORKERS = gauge(
    "baton_router_unpaired_workers",
    "Workers that fit no other worker for a handoff: by their KV layout or their transports.",
    ["worker_role"],
)
KV_RESUBSCRIPTIONS = counter(
    "baton_router_kv_resubscriptions_total",
    "Subscriptions to workers' KV events that ended, because a message was missing or the worker was away.",
)
LOST_REPORTS = gauge(
    "baton_router_lost_report_streams",
    "Streams of reports of registered workers that are lost now, and are asked for again.",
    ["reports"],
)
WORKER_FAULTS = counter(
    "baton_router_worker_faults_total",
    "Replies and reports of workers that they may not give, and calls that they did not answer in time.",
    ["stage"],
)
# How the router knew what the prefix cache held of the worker that runs the prompt.
CACHE_VIEWS = {
    generate_pb2.CACHE_VIEW_NONE: "none",
    generate_pb2.CACHE_VIEW_REPORTED: "reported",
    generate_pb2.CACHE_VIEW_ESTIMATED: "estimated",
}
PLACEMENTS = FrequentCounter(
    "baton_router_placements_total",
    "Requests that were placed, by how the router knew what the chosen worker's prefix cache held.",
    ["cache_view"],
    REGISTRY,
)
PLACED = {view: PLACEMENTS.labels(name) for view, name in CACHE_VIEWS.items()}  # by the message's number
PICKS = counter(
    "baton_router_endpoint_picks_total", "Requests of gateways, by how their endpoint was chosen.", ["chosen_by"]
)
for _how in ("policy", "load", "none"):
    PICKS.labels(_how)
TTFT_PREDICTION_ERROR = FrequentHistogram(
    "baton_router_ttft_prediction_error_ratio",
    "The error of the predicted time to first token, divided by the actual time.",
    (),
    (0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 2.0, 4.0),
    REGISTRY,
).labels()
EMBEDDING_CACHE_HITS = counter("baton_embedding_cache_hits_total", "Media whose embedding was in the cache.")
EMBEDDING_CACHE_MISSES = counter("baton_embedding_cache_misses_total", "Media whose embedding was not in the cache.")
EMBEDDING_CACHE_BYTES = gauge(
    "baton_embedding_cache_bytes", "Embeddings in the cache, here or leased on encode workers."
)
EMBEDDING_CACHE_EVICTIONS = counter(
    "baton_embedding_cache_evictions_total", "Embeddings that have left the cache.", ["reason"]
)


def observe_workers(workers: Iterable[tuple[str, str]]) -> None:
    """Sets the number of workers by role and state. A worker counts once for each of its roles."""
    counts = Count(workers)
    for role in roles():
        for state in WORKER_STATES:
            WORKERS.labels(role, state).set(counts[role, state])


def observe_unpaired(roles: Iterable[str]) -> None:
    """Sets the number of workers that fit no other for a handoff, by role."""
    counts = Count(roles)
    for role in ("prefill", "decode"):
        UNPAIRED_WORKERS.labels(role).set(counts[role])


def _begin_at_zero() -> None:
    """Creates the series at zero, since a series that begins at one shows no increase."""
    for stage in roles():
        RETRIES.labels(stage)
    for faulty in (*roles(), "kv_events", "loras", "attach"):
        WORKER_FAULTS.labels(faulty)
    for stage in ("prefill", "decode"):
        MIGRATIONS.labels(stage)
    for outcome in ("moved", "returned", "recomputed", "failed"):
        MOVES.labels(outcome)
    for result in RESUMED:
        RESUMPTIONS.labels(result)
    for result in ("attached", "lost"):
        REATTACHMENTS.labels(result)
    for kind in (DeadlineUnreachable, Overloaded, QuotaExceeded, QuotaUnavailable):
        REFUSALS.labels(kind.reason)
    for outcome in ("refused", "allowed"):
        QUOTA_FALLBACKS.labels(outcome)
    for reason in ("closed", "draining", "full", "idle", "lost", "relief"):
        EMBEDDING_CACHE_EVICTIONS.labels(reason)
    for reports in ("load", "kv_events"):
        LOST_REPORTS.labels(reports)
    observe_workers(())
    observe_unpaired(())


_begin_at_zero()
