"""The metrics of a worker. docs/metrics.md explains each one."""

from collections.abc import Iterable

from baton.inference.v1 import timing_pb2
from runtime.telemetry.metrics import counter, gauge, histogram, info
from services.engines.answer import Finished
from services.engines.base import EngineLoad, ModelFacts
from services.engines.kv import HeldKv
from services.telemetry.timings import Timing

_SECONDS = (0.0001, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0)
_HANDOFF_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# The transport of a handoff without a transfer: the reader's own prefix cache had all blocks.
_NO_TRANSPORT = "none"

WORKER = info("baton_worker", "The worker's id, roles, model and engine.")
CALLS = counter("baton_worker_calls_total", "Calls of each stage that have ended.", ["stage", "outcome", "reason"])
RESTARTS = counter(
    "baton_worker_restarts_total",
    "Starts after another process of this worker had ended, by what ended it: a signal, hang, exit or upgrade.",
    ["cause"],
)
RESTART_SECONDS = gauge("baton_worker_restart_seconds", "From the end of the process before to this one's readiness.")
ASLEEP = gauge("baton_worker_asleep", "1 while the model sleeps, so that others have its memory (sleep.group).")
WAKES = counter("baton_worker_wakes_total", "Times that the model was woken for a request.")
WAKE_WAIT_SECONDS = histogram(
    "baton_worker_wake_wait_seconds", "How long calls waited for a model that slept.", buckets=_SECONDS
)
RUNNING = gauge("baton_worker_running_requests", "Requests that the engine computes now.")
WAITING = gauge("baton_worker_waiting_requests", "Requests that wait for blocks or for a place in the batch.")
WAITING_PREFILL_TOKENS = gauge("baton_worker_waiting_prefill_tokens", "Prompt tokens that wait to be computed.")
QUEUE_SECONDS = histogram(
    "baton_worker_queue_seconds",
    "From a call's arrival until the engine's first step for it, other stages left out.",
    ["stage"],
    buckets=_SECONDS,
)
COMPUTE_SECONDS = histogram(
    "baton_worker_compute_seconds",
    "How long a stage computed for one request, with others beside it in the batch.",
    ["stage"],
    buckets=_SECONDS,
)
PROMPT_TOKENS = counter("baton_worker_prompt_tokens_total", "Tokens of prompts that were run here.")
PREFIX_CACHE_HIT_TOKENS = counter(
    "baton_prefix_cache_hit_tokens_total", "Prompt tokens whose KV was in the prefix cache."
)
GENERATED_TOKENS = counter("baton_worker_generated_tokens_total", "Tokens that the engine generated.")
KV_BLOCKS = gauge(
    "baton_kv_blocks",
    "Blocks of the KV pool: total, used, free, and those of the used ones that are held for handoffs.",
    ["state"],
)
KV_BLOCK_BYTES = gauge("baton_kv_block_bytes", "The size of one block of the KV pool.")
KV_FRAGMENTATION = gauge(
    "baton_kv_fragmentation_ratio",
    "The part of the used blocks that has no token: of the last block of each sequence, and of what it reserved.",
)
KEPT_STREAMS = gauge(
    "baton_kept_streams",
    "Answers that are kept for other routers: read, parked without a reader, and ended.",
    ["state"],
)
KEPT_BYTES = gauge("baton_kept_stream_bytes", "What kept answers take, beside their prompts.")
KEPT_DROPPED = counter(
    "baton_kept_streams_dropped_total",
    "Kept answers that ended before anybody came: their grace was over, or a bound was reached.",
    ["reason"],
)
HANDOFFS_HELD = gauge("baton_handoffs_held", "Handoffs whose blocks are held now.")
HANDOFF_WAIT_SECONDS = histogram(
    "baton_handoff_wait_seconds",
    "How long handoffs waited for blocks of the worker that takes them over.",
    buckets=_SECONDS,
)
HANDOFF_SECONDS = histogram(
    "baton_handoff_seconds",
    "From the reservation of blocks until the KV was pulled and confirmed.",
    ["transport"],
    buckets=_HANDOFF_SECONDS,
)
HANDOFF_BYTES = counter("baton_handoff_bytes_total", "KV that was pulled and confirmed.", ["transport"])
HANDOFF_CACHED_BYTES = counter(
    "baton_handoff_cached_bytes_total",
    "KV of handoffs that did not have to move, since this worker had it in its prefix cache.",
)
HANDOFF_EARLY_BYTES = counter(
    "baton_handoff_early_bytes_total",
    "KV that was pulled while its prompt was computed, of that which was pulled and confirmed.",
)
LEASE_EXPIRIES = counter(
    "baton_handoff_lease_expiries_total", "Handoffs that were not released before their lease expired."
)
HANDOFFS_GIVEN_BACK = counter(
    "baton_handoffs_given_back_total",
    "Handoffs that were released because KV held for other workers left no room for them.",
)
HANDOFF_CHECKS = counter(
    "baton_handoff_checks_total",
    "Handoffs whose content was compared with its owner's, by handoff.verify: equal, or damaged.",
    ["outcome"],
)
LENT_BLOCKS = counter("baton_prefix_lent_blocks_total", "Blocks of the prefix cache that were lent to other workers.")
PREFIX_LOANS = counter(
    "baton_prefix_loans_total",
    "Attempts to borrow the beginning of a prompt from another worker's prefix cache, by how they ended.",
    ["outcome"],
)
PREFIX_LOAN_SECONDS = histogram(
    "baton_prefix_loan_seconds",
    "From the request for a loan until its blocks were pulled, checked and confirmed.",
    ["transport"],
    buckets=_HANDOFF_SECONDS,
)
PREFIX_LOAN_BYTES = counter("baton_prefix_loan_bytes_total", "KV that was borrowed and confirmed.", ["transport"])
CONFIRMATIONS_REFUSED = counter(
    "baton_handoff_confirmations_refused_total", "Releases of handoffs whose lease had expired."
)
YIELDED_DECODES = counter("baton_yielded_decodes_total", "Decodes that have ended here to go on elsewhere.")
EMBEDDING_PULL_SECONDS = histogram(
    "baton_embedding_pull_seconds",
    "From the request for a leased embedding until it was pulled and confirmed.",
    ["transport"],
    buckets=_HANDOFF_SECONDS,
)
EMBEDDING_PULL_BYTES = counter(
    "baton_embedding_pull_bytes_total", "Leased embeddings that were pulled and confirmed.", ["transport"]
)
EMBEDDING_BLOCKS = gauge(
    "baton_embedding_blocks", "Blocks of the pool of leased embeddings: all, and in use.", ["state"]
)
MEDIA_ENCODED = counter("baton_media_encoded_total", "Embeddings made: sent inline, or leased.", ["sent"])
MODEL_LOAD_SECONDS = gauge("baton_model_load_seconds", "The time that loading and warming up the model took.")


for _reason in ("grace", "parked", "bytes", "room"):
    # A series that begins at one shows no increase.
    KEPT_DROPPED.labels(_reason)


def introduce(worker_id: str, roles: Iterable[str], facts: ModelFacts) -> None:
    """Sets the info metric of the worker: id, roles, model and engine."""
    WORKER.info({"worker_id": worker_id, "roles": ",".join(roles), "model": facts.name, "engine": facts.engine})


def observe_load(load: EngineLoad) -> None:
    """Updates the gauges of the engine's load."""
    RUNNING.set(load.running)
    WAITING.set(load.waiting)
    WAITING_PREFILL_TOKENS.set(load.waiting_prefill_tokens)


def observe_kept(attached: int, parked: int, finished: int) -> None:
    """Updates the gauges of kept answers."""
    for state, count in (("attached", attached), ("parked", parked), ("finished", finished)):
        KEPT_STREAMS.labels(state).set(count)


def observe_blocks(load: EngineLoad) -> None:
    """Updates the gauges of the KV pool."""
    KV_BLOCKS.labels("total").set(load.blocks_total)
    KV_BLOCKS.labels("used").set(load.blocks_used)
    # An engine that does not report its pool's size has no gauges.
    KV_BLOCKS.labels("free").set(max(0, load.blocks_total - load.blocks_used))
    KV_BLOCKS.labels("held").set(load.blocks_held)
    KV_FRAGMENTATION.set(min(1.0, load.empty_blocks / load.blocks_used) if load.blocks_used else 0.0)


def observe_embeddings(total: int, used: int) -> None:
    """Updates the gauges of the embedding pool."""
    EMBEDDING_BLOCKS.labels("total").set(total)
    EMBEDDING_BLOCKS.labels("used").set(used)


def observe_prefill(timings: Iterable[Timing], kv: HeldKv, prompt_tokens: int) -> None:
    """Observes a prefill: its stages on this worker, and the first token."""
    seconds = {timing.stage: timing.seconds for timing in timings}
    QUEUE_SECONDS.labels("prefill").observe(seconds[timing_pb2.STAGE_PREFILL_QUEUE])
    COMPUTE_SECONDS.labels("prefill").observe(seconds[timing_pb2.STAGE_PREFILL_COMPUTE])
    PROMPT_TOKENS.inc(prompt_tokens)
    PREFIX_CACHE_HIT_TOKENS.inc(kv.cached_tokens)
    GENERATED_TOKENS.inc()


def observe_decode(finished: Finished, *, is_pulled: bool) -> None:
    """Observes the end of a decode. Its prompt counts on the worker that computed it."""
    QUEUE_SECONDS.labels("decode").observe(finished.queue_seconds)
    COMPUTE_SECONDS.labels("decode").observe(finished.decode_seconds)
    if not is_pulled:
        COMPUTE_SECONDS.labels("prefill").observe(finished.prefill_seconds)
        PROMPT_TOKENS.inc(finished.prompt_tokens)
        PREFIX_CACHE_HIT_TOKENS.inc(finished.cached_tokens)


def observe_handoff(timings: Iterable[Timing]) -> None:
    """Observes a handoff that was pulled and confirmed."""
    for timing in timings:
        if timing.stage == timing_pb2.STAGE_HANDOFF_WAIT:
            HANDOFF_WAIT_SECONDS.observe(timing.seconds)
        else:
            transport = timing.transport or _NO_TRANSPORT
            HANDOFF_SECONDS.labels(transport).observe(timing.seconds)
            HANDOFF_BYTES.labels(transport).inc(timing.num_bytes)
            HANDOFF_CACHED_BYTES.inc(timing.cached_bytes)
            HANDOFF_EARLY_BYTES.inc(timing.early_bytes)


def observe_embedding(timing: Timing) -> None:
    """Observes a leased embedding that was pulled and confirmed."""
    EMBEDDING_PULL_SECONDS.labels(timing.transport).observe(timing.seconds)
    EMBEDDING_PULL_BYTES.labels(timing.transport).inc(timing.num_bytes)
