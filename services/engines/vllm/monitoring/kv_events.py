"""The contents of vLLM's prefix cache, by the hash chain that routers know from other engines.

vLLM's own hashes mean nothing outside it. Each stored block names its parent, so that our chain is built link by link;
the root of a chain is that of its salt and its adapter, whose name in vLLM is our seed of it. Chains with images are
left out, and those of handoffs, whose salt no other request has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.prefix_hash import block_hash, root_hash
from services.engines.kv_events import KvPublisher
from services.engines.vllm.requests.builder import HANDOFF_SALT

# Blocks in other memory, and those of sliding windows, do not save a prompt's computation alone.
_MEDIA = ("GPU", None)
_KINDS = ("full_attention", None)


class CachedChains:
    """Converts the events of one rank, in order, and tells the publisher."""

    def __init__(self, rank: int, block_tokens: int, publisher: KvPublisher) -> None:
        self._rank = rank
        self._block_tokens = block_tokens
        self._publisher = publisher
        self._ours: dict[int | bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._ours)

    def feed(self, event: Mapping[str, Any]) -> None:
        """Notes one event; those of other kinds of blocks are skipped."""
        match event.get("type"):
            case "AllBlocksCleared":
                self.forget()
            case "BlockStored" if self._is_prompt_block(event):
                self._stored(event)
            case "BlockRemoved" if event.get("medium") in _MEDIA:
                for theirs in event["block_hashes"]:
                    self._removed(theirs)

    def forget(self) -> None:
        """Removes all blocks: events were lost, or the cache was cleared."""
        for theirs in list(self._ours):
            self._removed(theirs)

    def _is_prompt_block(self, event: Mapping[str, Any]) -> bool:
        plain = event.get("medium") in _MEDIA and event.get("kv_cache_spec_kind") in _KINDS
        whole = event.get("block_size") == self._block_tokens
        return plain and whole and not event.get("group_idx")

    def _stored(self, event: Mapping[str, Any]) -> None:
        hashes, tokens, size = event["block_hashes"], event["token_ids"], self._block_tokens
        keys: Sequence[Any] = event.get("extra_keys") or [None] * len(hashes)
        if len(tokens) != size * len(hashes) or len(keys) != len(hashes):
            return
        lora = event.get("lora_name") or ""
        keys = [_without(lora, each) for each in keys]
        parent = event.get("parent_block_hash")
        previous = _root(keys[0], lora) if parent is None else self._ours.get(parent)
        for index, theirs in enumerate(hashes):
            # The first block's key is the salt; a later one's is an image.
            if previous is None or (keys[index] and not (index == 0 and parent is None)):
                return
            previous = block_hash(previous, tokens[index * size : (index + 1) * size])
            self._ours[theirs] = previous
            self._publisher.stored(previous, self._rank)

    def _removed(self, theirs: int | bytes) -> None:
        if (ours := self._ours.pop(theirs, None)) is not None:
            self._publisher.removed(ours, self._rank)


def _without(lora: str, keys: Any) -> list[Any]:
    """The keys of a block without its adapter's, which vLLM puts first."""
    found = list(keys or ())
    return found[1:] if lora and found[:1] == [lora] else found


def _root(keys: Sequence[Any], lora: str) -> bytes | None:
    """The root of a chain whose first block has these keys; None for one that is left out."""
    match keys:
        case []:
            return root_hash("", lora)
        case [str(salt)] if not salt.startswith(HANDOFF_SALT):
            return root_hash(salt, lora)
        case _:
            return None
