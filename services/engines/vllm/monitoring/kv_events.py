"""vLLM's KV events, as blocks of our hash chain.

The root of a chain is that of its salt and its adapter, whose name in vLLM is our seed of it. Images are in their
blocks by digest and place. Chains with anything else are left out, and those of handoffs, whose salt no other request
has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine_protocol.prefix_hash import media_key, root_hash
from services.engines.external.cached_chains import BlockEvent, BlocksRemoved, BlocksStored, CacheCleared
from services.engines.external.event_reader import EventFormat
from services.engines.kv_events import KvTier
from services.engines.prompt import MediaSpan
from services.engines.vllm.monitoring import metrics
from services.engines.vllm.requests.builder import HANDOFF_SALT
from services.engines.vllm.requests.media import span_named

# vLLM's media: those that the OffloadingConnector reports as CPU may be in the pool, too.
_TIERS = {"GPU": KvTier.DEVICE, None: KvTier.DEVICE, "CPU": KvTier.HOST}
# Blocks in other memory, and those of sliding windows, do not save a prompt's computation alone.
_KINDS = ("full_attention", None)


def vllm_format(block_tokens: int) -> EventFormat:
    """The format of an engine with blocks of this size."""
    return EventFormat("vllm", partial(read_event, block_tokens), metrics.KV_EVENT_GAPS.inc)


def read_event(block_tokens: int, event: Mapping[str, Any]) -> BlockEvent | None:
    """Converts an event; None for those of other kinds of blocks. Raises errors of dictionaries for no event."""
    match event.get("type"):
        case "AllBlocksCleared":
            return CacheCleared()
        case "BlockStored" if _is_prompt_block(event, block_tokens):
            return _stored(event, block_tokens)
        case "BlockRemoved" if event.get("medium") in _TIERS:
            return BlocksRemoved(event["block_hashes"], _TIERS[event.get("medium")])
        case _:
            return None


def _is_prompt_block(event: Mapping[str, Any], block_tokens: int) -> bool:
    plain = event.get("medium") in _TIERS and event.get("kv_cache_spec_kind") in _KINDS
    whole = event.get("block_size") == block_tokens
    return plain and whole and not event.get("group_idx")


def _stored(event: Mapping[str, Any], size: int) -> BlocksStored | None:
    hashes, tokens = event["block_hashes"], event["token_ids"]
    keys: Sequence[Any] = event.get("extra_keys") or [None] * len(hashes)
    if len(tokens) != size * len(hashes) or len(keys) != len(hashes):
        return None
    lora, parent = event.get("lora_name") or "", event.get("parent_block_hash")
    parts = [_parts(_without(lora, each)) for each in keys]
    # The first block of a chain has the salt. One with other keys, and all behind it, are left out.
    begins = parent is None
    known = next((index for index, each in enumerate(parts) if each.others and index >= begins), len(parts))
    return BlocksStored(
        hashes[:known],
        parent,
        _root(parts[0].others, lora) if begins else None,
        [tokens[index * size : (index + 1) * size] for index in range(known)],
        [media_key(each.media, 0, size) for each in parts[:known]],
        _TIERS[event.get("medium")],
    )


@dataclass(frozen=True, slots=True)
class _BlockKeys:
    """vLLM's keys of a block: its images, placed from its first token on, and other ones."""

    media: tuple[MediaSpan, ...]
    others: tuple[Any, ...]


def _parts(keys: Sequence[Any]) -> _BlockKeys:
    media, others = [], []
    for key in keys:
        match key:
            case [name, int(start)] if (span := span_named(name, start)) is not None:
                media.append(span)
            case _:
                others.append(key)
    return _BlockKeys(tuple(media), tuple(others))


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
