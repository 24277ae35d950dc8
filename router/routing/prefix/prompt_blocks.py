"""The names of a prompt's KV blocks, computed on the event loop or, for a long prompt, in a thread."""

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from router.routing.policy import NO_BLOCKS, PromptBlocks, RoutingRequest
from router.routing.prefix.kv_index import block_keys, chain_keys
from router.workers.model import ServedModel
from runtime.prefix_hash import TOKEN_BYTES, block_hashes, extend_chain, root_hash, token_bytes

# Most requests have the same salt and adapter: none.
_root_hash = lru_cache(256)(root_hash)

# Longer prompts are hashed in a thread: a block of 16 tokens takes more than half a microsecond.
_MANY_TOKENS = 4 * 1024
# So many blocks are remembered together.
_PIECE_BLOCKS = 16
# How many pieces each of the two generations has: about 2 KB for each piece with blocks of 16 tokens.
_MOST_PIECES = 4096

# The hash before a piece and the bytes of its ids; the hash after it, and the keys of its blocks.
_Pieces = dict[tuple[bytes, bytes], tuple[bytes, Sequence[int]]]


class PromptHasher:
    """Names the blocks of prompts. The names of beginnings that prompts share are remembered for a while.

    Threads may use it at the same time: the worst that follows is that something is computed twice.
    """

    def __init__(self) -> None:
        # When the newer generation is full it becomes the older one, and what was not used meanwhile is forgotten.
        self._newer: _Pieces = {}
        self._older: _Pieces = {}

    async def blocks(self, request: RoutingRequest, model: ServedModel) -> PromptBlocks:
        """The full blocks of a prompt, named as workers name them; none if the model has no known block size."""
        if not model.block_tokens:
            return NO_BLOCKS
        if request.prompt_tokens < _MANY_TOKENS:
            return self._blocks(request, model)
        return await asyncio.to_thread(self._blocks, request, model)

    def _blocks(self, request: RoutingRequest, model: ServedModel) -> PromptBlocks:
        prompt, size = request.prompt, model.block_tokens
        token_ids = request.token_ids or prompt.token_ids[:]
        lora = f"{prompt.lora.digest}:{prompt.lora.name}" if prompt.HasField("lora") else ""
        if prompt.media:
            keys = block_keys(block_hashes(token_ids, size, prompt.cache_salt, prompt.media, lora))
        else:
            keys = self.keys(token_ids, size, prompt.cache_salt, lora)
        return PromptBlocks(keys, size, model.block_bytes)

    def keys(self, token_ids: Sequence[int], block_tokens: int, salt: str = "", lora: str = "") -> list[int]:
        """The keys of the full blocks of a prompt without media."""
        content, width = token_bytes(token_ids), TOKEN_BYTES * block_tokens * _PIECE_BLOCKS
        parent, keys, start = _root_hash(salt, lora), list[int](), 0
        while len(content) - start >= width:
            found = self._find(parent, content[start : start + width])
            if found is None:
                break
            parent, piece = found
            keys += piece
            start += width
        rest = content[start:]
        hashes = extend_chain(parent, rest, block_tokens)
        new = chain_keys(hashes)
        self._remember(parent, rest, width, hashes, new)
        return keys + new

    def _find(self, parent: bytes, content: bytes) -> tuple[bytes, Sequence[int]] | None:
        """The piece with this content after this hash, if it was seen before."""
        place = parent, content
        found = self._newer.get(place)
        if found is None:
            found = self._older.get(place)
            if found is not None:
                self._note(place, found)
        return found

    def _remember(self, parent: bytes, content: bytes, width: int, hashes: list[bytes], keys: list[int]) -> None:
        """Notes all whole pieces of `content`, whose blocks have these hashes and keys."""
        for number in range(len(content) // width):
            last = (number + 1) * _PIECE_BLOCKS
            found = hashes[last - 1], keys[last - _PIECE_BLOCKS : last]
            self._note((parent, content[number * width : (number + 1) * width]), found)
            parent = hashes[last - 1]

    def _note(self, place: tuple[bytes, bytes], found: tuple[bytes, Sequence[int]]) -> None:
        if len(self._newer) >= _MOST_PIECES:
            self._older, self._newer = self._newer, {}
        self._newer[place] = found
