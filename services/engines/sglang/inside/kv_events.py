"""KV events that tell the salt of each chain. SGLang's own know tokens alone: its hashes are the same with and without
a salt, so that a removed block would be one of either.

Here the hashes of a salted chain begin with that of the salt, and a BlockStored has the salt as one more field, empty
for a chain without one. Caches of other kinds, such as those of sliding windows, keep SGLang's events.
"""

import hashlib
import importlib
from typing import Any


def change() -> None:
    """Applies the changes. Call it once, before a Scheduler is made."""
    cache = importlib.import_module("sglang.srt.mem_cache.radix_cache")
    events = importlib.import_module("sglang.srt.disaggregation.kv_events")
    publisher = importlib.import_module("sglang.srt.managers.scheduler_components.kv_events_publisher")
    tell_salts(cache.RadixCache, events.BlockStored, cache.get_hash_str)
    publisher.SchedulerKvEventsPublisher.emit_kv_metrics = _emit_nothing


def _emit_nothing(_: Any) -> None:
    """SGLang sends the metrics of each step to a socket that nothing reads here: they would stay in memory."""


def tell_salts(cache: Any, event: Any, hashes: Any) -> None:
    """Changes the class of a radix cache, whose nodes are one chain of pages each."""
    record = cache._record_store_event
    fields = event.__struct_fields__
    salt_field = ("salt", str | None, None)
    salted = importlib.import_module("msgspec").defstruct("BlockStored", [salt_field], bases=(event,), tag=True)

    def record_store_event(self: Any, node: Any, medium: Any = None) -> None:
        if not self.enable_kv_cache_events:
            return
        salt = node.key.extra_key or ""
        if salt and node.hash_value is None and node.parent is self.root_node:
            node.hash_value = hashes(node.key, hashlib.sha256(salt.encode()).hexdigest(), page_size=self.page_size)
        first = len(self.kv_event_queue)
        record(self, node, medium)
        own = self.kv_event_queue[first:]
        self.kv_event_queue[first:] = [salted(*(getattr(each, name) for name in fields), salt) for each in own]

    cache._record_store_event = record_store_event
