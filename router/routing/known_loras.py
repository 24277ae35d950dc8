"""The adapters (LoRA) that a worker has, as a policy sees them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.errors import InvalidReply
from baton.inference.v1 import lora_pb2
from router.routing.policy import Candidates, W

# A router keeps an inventory for as long as its worker is there, and looks through it for each request of an adapter.
_MOST_ADAPTERS = 4096
_MOST_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class KnownLoras:
    """The adapters that a worker has reported, by digest and name. Not `is_reported` before, or if it serves none."""

    loaded: frozenset[tuple[str, str]] = frozenset()
    adapters: tuple[lora_pb2.LoraAdapter, ...] = field(default=(), compare=False)
    usable: frozenset[tuple[str, str]] = frozenset()
    is_reported: bool = False

    @classmethod
    def of(cls, inventory: lora_pb2.LoraInventory) -> "KnownLoras":
        """Reads a worker's report. Raises InvalidReply if it is too large to keep."""
        count = len(inventory.loaded) + len(inventory.available)
        if count > _MOST_ADAPTERS:
            raise InvalidReply(f"an inventory of {count} adapters; the most is {_MOST_ADAPTERS}")
        if (size := inventory.ByteSize()) > _MOST_BYTES:
            raise InvalidReply(f"an inventory of adapters of {size} bytes; the most is {_MOST_BYTES}")
        adapters = (*inventory.loaded, *inventory.available)
        loaded = frozenset(map(_key, inventory.loaded))
        return cls(loaded, adapters, frozenset(map(_key, adapters)), is_reported=True)

    def can_use(self, adapter: lora_pb2.LoraAdapter) -> bool:
        """True if the worker has the adapter, or can load it."""
        return _key(adapter) in self.usable

    def has_loaded(self, adapter: lora_pb2.LoraAdapter) -> bool:
        """True if the worker has the adapter in memory."""
        return _key(adapter) in self.loaded


def _key(adapter: lora_pb2.LoraAdapter) -> tuple[str, str]:
    return adapter.digest, adapter.name


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
