"""The stand-in's prefix cache, and the events by which it tells what it holds: a queue that a read empties."""

import hashlib
import itertools
from collections import OrderedDict
from typing import Any

_hashes = itertools.count(2**63 + 1)  # Beyond what is signed.
_WINDOW = 4096
_GROUPS = (0, 1)


class PrefixCache:
    """Blocks of prompts that were computed, oldest out first. It takes no part in the count of free blocks."""

    def __init__(self, config: Any, rank: int | None = None, *, is_v2: bool = False) -> None:
        self._is_v2 = is_v2
        self._block_tokens = config.tokens_per_block
        self._is_on = config.enable_block_reuse
        self._max_events = config.event_buffer_max_size
        self._rank = rank
        self.room = 64
        self._blocks: OrderedDict[tuple[Any, ...], int | str] = OrderedDict()
        self._next_event = 0
        self.events: list[dict[str, Any]] = []
        self._tell({"type": "created", "num_blocks_per_cache_level": [64, 0]})

    @property
    def is_reported(self) -> bool:
        """True if there are events."""
        return self._is_on and self._max_events > 0

    def reused(self, meaning: tuple[int, ...], salt: str | None) -> int:
        """The number of a prompt's whole blocks that are here; its last token is always computed."""
        count = 0
        while self._is_on and (count + 1) * self._block_tokens < len(meaning):
            if (salt, meaning[: (count + 1) * self._block_tokens]) not in self._blocks:
                break
            count += 1
        return count

    def store(self, meaning: tuple[int, ...], salt: str | None) -> None:
        """Keeps a prompt's blocks, the last of which may be partly filled."""
        if not self._is_on:
            return
        parent, new = None, []
        for end in range(self._block_tokens, len(meaning) + self._block_tokens, self._block_tokens):
            key = (salt, meaning[:end])
            if key not in self._blocks:
                self._blocks[key] = self._next_hash()
                new.append(_stored(self._blocks[key], meaning[end - self._block_tokens : end], salt))
            elif not new:
                parent = self._blocks[key]
        if new:
            self._tell({"type": "stored", "parent_hash": parent, "blocks": new})
        while len(self._blocks) > self.room:
            _, gone = self._blocks.popitem(last=False)
            self._tell({"type": "removed", "block_hashes": [gone]})

    def lose_event(self) -> None:
        """Loses events, as if the buffer had been too small."""
        self._next_event += 1

    def _next_hash(self) -> int | str:
        number = next(_hashes)
        return hashlib.sha256(str(number).encode()).hexdigest() if self._is_v2 else number

    def _tell(self, content: dict[str, Any]) -> None:
        """One event, or with the second manager one for each group of layers."""
        for group in _GROUPS if self._is_v2 else (None,):
            event: dict[str, Any] = {"event_id": self._next_event, "window_size": _WINDOW, "data": content}
            if group is not None:
                event |= {"layer_group_id": group, "hash_algo": "v2_sha256"}
            if self._rank is not None:
                event["attention_dp_rank"] = self._rank
            self._next_event += 1
            if self._max_events:
                self.events.append(event)


def _stored(number: int | str, tokens: tuple[int, ...], salt: str | None) -> dict[str, Any]:
    # Of images there are digests, as text.
    listed = [token if token < 2**32 else f"{token:x}" for token in tokens]
    found = {
        "type": "stored_block",
        "block_hash": number,
        "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in listed],
        "cache_level": 0,
        "priority": 35,
        "cache_salt": salt,
    }
    return found if all(isinstance(token, int) for token in listed) else {**found, "mm_keys": [{"type": "mm_key"}]}
