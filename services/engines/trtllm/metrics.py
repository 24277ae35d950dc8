"""What this adapter adds to a worker's metrics; TensorRT-LLM's own are in native.py."""

from prometheus_client import Counter, Gauge

from rpc.metrics import REGISTRY

OUTSTANDING = Gauge(
    "baton_trtllm_handoffs_outstanding", "Prompts whose KV TensorRT-LLM holds until it is fetched.", registry=REGISTRY
)
OUTSTANDING_TOKENS = Gauge("baton_trtllm_handoff_tokens_outstanding", "Tokens of these prompts.", registry=REGISTRY)
OLDEST_SECONDS = Gauge(
    "baton_trtllm_oldest_handoff_seconds", "For how long the oldest of them has been held.", registry=REGISTRY
)
ABORTS = Counter(
    "baton_trtllm_aborts_total", "Requests that were aborted inside TensorRT-LLM.", ["when"], registry=REGISTRY
)
STALLED_READERS = Counter(
    "baton_trtllm_stalled_readers_total", "Requests aborted because nobody read their answer.", registry=REGISTRY
)
KV_EVENT_GAPS = Counter("baton_trtllm_kv_event_gaps_total", "Times that KV events were lost.", registry=REGISTRY)
POLLING = Gauge(
    "baton_trtllm_polling",
    "Whether statistics and KV events are read: 1, or 0 after that has failed.",
    registry=REGISTRY,
)
