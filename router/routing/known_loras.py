"""The adapters (LoRA) that a worker has, as a policy sees them."""

from dataclasses import dataclass, field

from baton.errors import InvalidReply
from baton.inference.v1 import lora_pb2

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
