"""Simulated workers of a model that sees, and requests about pictures, for tests of the router."""

from typing import Any

from support.bench import simulated
from support.pictures import picture
from support.scraping import sample

from services.config import EncodeConfig, HandoffConfig, WorkerConfig

IMAGE_TOKENS = 4
EMBEDDING_BYTES = IMAGE_TOKENS * 64 * 4
PROMPT = "look at <image> and tell"
TEXT_TOKENS = len(PROMPT) - len("<image>")


def seeing(worker_id: str, *roles: str, **engine: object) -> WorkerConfig:
    """A worker whose embeddings are in the answers."""
    return simulated(worker_id, *roles, **{"image_tokens": IMAGE_TOKENS, **engine})


def leasing(worker_id: str, *roles: str, lease_seconds: float = 1.0, room: int = 64, **engine: object) -> WorkerConfig:
    """A worker that leases embeddings; its pool has room for so many."""
    # A block of the pool has 16 rows, an image 4.
    encode = EncodeConfig(inline_bytes=0, pool_bytes=room * 16 * 64 * 4)
    handoff = HandoffConfig(lease_seconds=lease_seconds)
    return seeing(worker_id, *roles, **engine).model_copy(update={"encode": encode, "handoff": handoff})


def about(*pictures: bytes, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A greedy request about these pictures, by default the one that `picture()` is."""
    files = pictures or (picture(),)
    prompt = "look at " + "<image>" * len(files) + " and tell"
    request = {"prompt": prompt, "sampling": {"temperature": 0.0}, "stopping": {"max_tokens": max_tokens}}
    return {**request, "media": [{"data": file} for file in files], **fields}


def different(count: int) -> list[bytes]:
    """So many pictures, no two of which are equal."""
    return [picture(width=16 + number) for number in range(count)]


def encoded() -> float:
    """Media that workers of this process have encoded."""
    return sum(sample("baton_media_encoded_total", sent=sent) for sent in ("inline", "leased"))
