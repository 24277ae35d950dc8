"""Simulated workers of a model that takes images, and requests about pictures, for tests of the router."""

from typing import Any

from support.clients.scraping import sample
from support.cluster.in_process import simulated
from support.images.pictures import picture

from services.config import EncodeConfig, HandoffConfig, WorkerConfig

IMAGE_TOKENS = 4
EMBEDDING_BYTES = IMAGE_TOKENS * 64 * 4
PROMPT = "look at <image> and tell"
TEXT_TOKENS = len(PROMPT) - len("<image>")


def multimodal(worker_id: str, *roles: str, **engine: object) -> WorkerConfig:
    """A worker that returns embeddings inline."""
    return simulated(worker_id, *roles, **{"image_tokens": IMAGE_TOKENS, **engine})


def leasing(worker_id: str, *roles: str, lease_seconds: float = 1.0, room: int = 64, **engine: object) -> WorkerConfig:
    """A worker that leases embeddings; its pool has room for `room` of them."""
    # A block of the pool has 16 rows, an image 4.
    encode = EncodeConfig(inline_bytes=0, pool_bytes=room * 16 * 64 * 4)
    handoff = HandoffConfig(lease_seconds=lease_seconds)
    return multimodal(worker_id, *roles, **engine).model_copy(update={"encode": encode, "handoff": handoff})


def about(*pictures: bytes, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A greedy request about these pictures, by default the one that `picture()` is."""
    files = pictures or (picture(),)
    prompt = "look at " + "<image>" * len(files) + " and tell"
    request = {"prompt": prompt, "sampling": {"temperature": 0.0}, "stopping": {"max_tokens": max_tokens}}
    return {**request, "media": [{"data": file} for file in files], **fields}


def different(count: int) -> list[bytes]:
    """`count` different pictures."""
    return [picture(width=16 + number) for number in range(count)]


def encoded() -> float:
    """The number of media that workers of this process have encoded."""
    return sum(sample("baton_media_encoded_total", sent=sent) for sent in ("inline", "leased"))
