"""A worker's metrics, for Prometheus."""

from prometheus_client import Counter, Gauge

from services.engine import EngineLoad

MODEL_LOAD_SECONDS = Gauge("baton_model_load_seconds", "What loading and warming up the model took.")
KV_BLOCKS = Gauge("baton_kv_blocks", "Blocks of the pool: all, in use, and of these held for handoffs.", ["state"])
EMBEDDING_BLOCKS = Gauge(
    "baton_embedding_blocks", "Blocks of the pool of leased embeddings: all, and in use.", ["state"]
)
MEDIA_ENCODED = Counter("baton_media_encoded_total", "Embeddings made: sent inline, or leased.", ["sent"])
HANDOFFS_HELD = Gauge("baton_handoffs_held", "Handoffs whose blocks are held now.")
LEASE_EXPIRIES = Counter("baton_handoff_lease_expiries_total", "Handoffs that nobody released in time.")
CONFIRMATIONS_REFUSED = Counter(
    "baton_handoff_confirmations_refused_total", "Releases that were told that the lease had not held."
)


def observe(load: EngineLoad, handoffs_held: int) -> None:
    """Brings the gauges up to date."""
    KV_BLOCKS.labels("total").set(load.blocks_total)
    KV_BLOCKS.labels("used").set(load.blocks_used)
    KV_BLOCKS.labels("held").set(load.blocks_held)
    HANDOFFS_HELD.set(handoffs_held)


def observe_embeddings(total: int, used: int) -> None:
    """Brings the gauges of the embedding pool up to date."""
    EMBEDDING_BLOCKS.labels("total").set(total)
    EMBEDDING_BLOCKS.labels("used").set(used)
