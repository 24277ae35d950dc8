"""The hash chain of a growing sequence."""

from collections.abc import Sequence

from runtime.prefix_hash import block_hash, extend_chain, media_key, root_hash, token_bytes
from services.engines.prompt import MediaSpan


class HashChain:
    """The hashes of a growing sequence's full blocks, each computed once."""

    __slots__ = ("_block_tokens", "_links", "_media", "_root")

    def __init__(self, salt: str, block_tokens: int, media: Sequence[MediaSpan] = (), lora: str = "") -> None:
        self._root = root_hash(salt, lora)
        self._block_tokens = block_tokens
        self._media = media
        self._links: list[bytes] = []

    def upto(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """Returns the hashes of the full blocks in the first `num_tokens` tokens. Tokens may be appended, never
        changed.
        """
        full, links, size = num_tokens // self._block_tokens, self._links, self._block_tokens
        if len(links) < full and not self._media:
            content = token_bytes(token_ids[len(links) * size : full * size])
            links += extend_chain(links[-1] if links else self._root, content, size)
        while len(links) < full:
            start = len(links) * size
            end = start + size
            parent = links[-1] if links else self._root
            links.append(block_hash(parent, token_ids[start:end], media_key(self._media, start, end)))
        return links[:full]

    def value(self, token_ids: Sequence[int], num_tokens: int) -> bytes:
        """Returns the last hash of those blocks, or the root if there is none."""
        links = self.upto(token_ids, num_tokens)
        return links[-1] if links else self._root

    def unfinished(self, token_ids: Sequence[int], num_tokens: int) -> bytes | None:
        """Returns the name of the block that the first `num_tokens` tokens fill in part; None with media, which would
        have to be in it.
        """
        if self._media:
            return None
        links = self.upto(token_ids, num_tokens)
        return block_hash(links[-1] if links else self._root, token_ids[len(links) * self._block_tokens : num_tokens])
