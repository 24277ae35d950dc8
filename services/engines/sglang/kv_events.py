"""SGLang's KV events, as blocks of our hash chain.

SGLang's own events do not say the salt of a chain, and its hashes are the same with and without one.
inside/kv_events.py adds the salt to both; blocks without it, and those of other sizes, memories and adapters, are left
out.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from engine_protocol.prefix_hash import root_hash
from services.engines.external.cached_chains import BlockEvent, BlocksRemoved, BlocksStored, CacheCleared
from services.engines.external.event_reader import EventFormat
from services.engines.sglang import metrics

_POOL = "GPU"


def sglang_format(block_tokens: int) -> EventFormat:
    """The format of an engine with pages of this size."""
    return EventFormat("sglang", partial(read_event, block_tokens), metrics.KV_EVENT_GAPS.inc)


def read_event(block_tokens: int, event: Sequence[Any]) -> BlockEvent | None:
    """Converts an event, an array that begins with its kind; None for one that is left out.

    Raises ValueError for anything else.
    """
    match event:
        case ["AllBlocksCleared"]:
            return CacheCleared()
        case ["BlockRemoved", list(hashes), str(medium)]:
            return BlocksRemoved(hashes) if medium == _POOL else None
        case ["BlockStored", list(hashes), parent, list(tokens), int(size), lora, medium, str(salt)]:
            is_whole = size == block_tokens and len(tokens) == size * len(hashes)
            if not is_whole or lora is not None or medium != _POOL:
                return None
            blocks = [tokens[start : start + size] for start in range(0, len(tokens), size)]
            return BlocksStored(hashes, parent, root_hash(salt), blocks, [b""] * len(blocks))
        case ["BlockStored", list(), _, list(), int(), *_]:
            return None
        case _:
            raise ValueError("is no event of SGLang")
