"""The names of a prompt's KV blocks, computed when they are read or, for a long prompt, at once in a thread."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import overload

from engine_protocol.prefix_hash import TOKEN_BYTES, block_hashes, extend_chain, root_hash, token_bytes
from router.routing.policy import NO_BLOCKS, PromptBlocks, RoutingRequest
from router.routing.prefix.kv_index import block_keys, chain_keys
from router.text.served_model import ServedModel

# Most requests have the same salt and adapter: none.
_root_hash = lru_cache(256)(root_hash)

# Longer prompts are hashed in a thread: a block of 16 tokens takes more than half a microsecond.
_MANY_TOKENS = 4 * 1024
# So many blocks are named and remembered together.
_PIECE_BLOCKS = 16
# How many pieces each of the two generations has: about 2 KB for each piece with blocks of 16 tokens.
_MOST_PIECES = 4096

# The hash before a piece and the bytes of its ids; the hash after it, and the keys of its blocks.
_Pieces = dict[tuple[bytes, bytes], tuple[bytes, Sequence[int]]]


class BlockKeys(Sequence[int]):
    """The keys of a prompt's blocks, each of them computed with its piece when it is first read.

    A search for the prompt's prefix ends at the first block that no cache has, and needs no key after it. Not for
    several threads at a time.
    """

    __slots__ = ("_count", "_known", "_pieces")

    def __init__(self, pieces: Iterator[Sequence[int]], count: int) -> None:
        """`pieces` has `count` keys altogether."""
        self._pieces = pieces
        self._count = count
        self._known: list[int] = []

    @property
    def num_known(self) -> int:
        """The number of blocks whose names have been computed."""
        return len(self._known)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._read())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            self._extend(stop if step > 0 else start + 1)
            return [self._known[at] for at in range(start, stop, step)] if step != 1 else self._known[start:stop]
        if index < 0:
            index += self._count
        if not 0 <= index < self._count:
            raise IndexError(f"no block {index}: there are {self._count}")
        if index >= len(self._known):
            self._extend(index + 1)
        return self._known[index]

    def _extend(self, count: int) -> None:
        while len(self._known) < count:
            self._known += next(self._pieces)

    def _read(self) -> Iterator[Sequence[int]]:
        """All keys, in pieces as large as there are."""
        at = 0
        while at < self._count:
            self._extend(at + 1)
            piece = self._known[at:]
            yield piece
            at += len(piece)


class PromptHasher:
    """Names the blocks of prompts. The names of beginnings that prompts share are remembered for a while.

    Threads may use it at the same time: the worst that follows is that something is computed twice.
    """

    def __init__(self) -> None:
        # When the newer generation is full it becomes the older one, and what was not used meanwhile is forgotten.
        self._newer: _Pieces = {}
        self._older: _Pieces = {}

    def is_quick(self, request: RoutingRequest) -> bool:
        """True if the blocks of a prompt are named soon enough for an event loop."""
        return request.prompt_tokens < _MANY_TOKENS

    def blocks(self, request: RoutingRequest, model: ServedModel) -> PromptBlocks:
        """The full blocks of a prompt, named as workers name them; none if the model has no known block size."""
        prompt, size = request.prompt, model.block_tokens
        if not size:
            return NO_BLOCKS
        token_ids = request.token_ids or prompt.token_ids[:]
        lora = f"{prompt.lora.digest}:{prompt.lora.name}" if prompt.HasField("lora") else ""
        keys: Sequence[int]
        if prompt.media:
            keys = block_keys(block_hashes(token_ids, size, prompt.cache_salt, prompt.media, lora))
        else:
            keys = self.keys(token_ids, size, prompt.cache_salt, lora)
        return PromptBlocks(keys, size, model.block_bytes)

    def named_blocks(self, request: RoutingRequest, model: ServedModel) -> PromptBlocks:
        """The result of `blocks`, with all names computed."""
        blocks = self.blocks(request, model)
        return PromptBlocks(list(blocks.keys), blocks.block_tokens, blocks.block_bytes)

    def keys(self, token_ids: Sequence[int], block_tokens: int, salt: str = "", lora: str = "") -> BlockKeys:
        """The keys of the full blocks of a prompt without media. The ids must not change until one is read."""
        count = len(token_ids) // block_tokens
        return BlockKeys(self._pieces(token_ids, block_tokens, count, _root_hash(salt, lora)), count)

    def _pieces(self, token_ids: Sequence[int], size: int, count: int, parent: bytes) -> Iterator[Sequence[int]]:
        """The keys of `count` blocks after a hash. Pieces that are whole are remembered."""
        may_be_known = True
        for content in _packed(token_ids, size * _PIECE_BLOCKS, size * count):
            place = parent, content
            found = self._find(place) if may_be_known else None
            if found is None:
                may_be_known = False  # nor can what follows it
                hashes = extend_chain(*place, size)
                found = hashes[-1], chain_keys(hashes)
                if len(hashes) == _PIECE_BLOCKS:
                    self._remember(place, found)
            parent, keys = found
            yield keys

    def _find(self, place: tuple[bytes, bytes]) -> tuple[bytes, Sequence[int]] | None:
        """The piece with this content after this hash, if it was seen before."""
        found = self._newer.get(place)
        if found is None:
            found = self._older.get(place)
            if found is not None:
                self._remember(place, found)
        return found

    def _remember(self, place: tuple[bytes, bytes], found: tuple[bytes, Sequence[int]]) -> None:
        if len(self._newer) >= _MOST_PIECES:
            self._older, self._newer = self._newer, {}
        self._newer[place] = found


def _packed(token_ids: Sequence[int], piece_tokens: int, end: int) -> Iterator[bytes]:
    """The bytes of each piece of the first `end` ids.

    They are packed some pieces at a time and each time twice as many, since what is not read need not be packed.
    """
    width, start, pieces = TOKEN_BYTES * piece_tokens, 0, 1
    while start < end:
        stop = min(start + piece_tokens * pieces, end)
        content = token_bytes(token_ids[start:stop])
        for at in range(0, len(content), width):
            yield content[at : at + width]
        start, pieces = stop, 2 * pieces
