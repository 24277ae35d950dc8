"""The adapters (LoRA) that a worker has, as a policy sees them."""

from dataclasses import dataclass, field

from baton.inference.v1 import lora_pb2


@dataclass(frozen=True, slots=True)
class KnownLoras:
    """The adapters that a worker has reported, by digest and name. Not `is_reported` before, or if it serves none."""

    loaded: frozenset[tuple[str, str]] = frozenset()
    adapters: tuple[lora_pb2.LoraAdapter, ...] = field(default=(), compare=False)
    usable: frozenset[tuple[str, str]] = frozenset()
    is_reported: bool = False

    @classmethod
    def of(cls, inventory: lora_pb2.LoraInventory) -> "KnownLoras":
        """Reads a worker's report."""
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
