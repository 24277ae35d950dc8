"""Prefers workers that have a request's adapter in memory, while they are not much busier than the others."""

from collections.abc import Sequence
from dataclasses import replace

from baton.inference.v1 import lora_pb2
from router.routing.policy import Candidates, W

# How many requests busier a worker that has the adapter may be than the least busy one, which would have to load it.
_SLACK_REQUESTS = 8


def prefer_loaded(candidates: Candidates[W], adapter: lora_pb2.LoraAdapter | None) -> Candidates[W]:
    """Leaves out workers that would have to load the adapter, as long as there are enough others."""
    if adapter is None:
        return candidates
    decode = _loaded(candidates.decode, adapter)
    preferred = replace(candidates, decode=decode, prefill=_loaded(candidates.prefill, adapter))
    if not candidates.prefill:
        return preferred
    # A worker that can hand over is worth more than a loaded adapter.
    paired = [worker for worker in decode if preferred.prefill_for(worker)]
    if paired:
        return replace(preferred, decode=paired) if candidates.requires_prefill else preferred
    paired = [worker for worker in decode if candidates.prefill_for(worker)]
    return replace(candidates, decode=paired) if paired else candidates


def _loaded(workers: Sequence[W], adapter: lora_pb2.LoraAdapter) -> Sequence[W]:
    loaded = [worker for worker in workers if worker.loras.has_loaded(adapter)]
    if not loaded:
        return workers
    least = min(worker.requests for worker in workers)
    return loaded if min(worker.requests for worker in loaded) <= least + _SLACK_REQUESTS else workers
