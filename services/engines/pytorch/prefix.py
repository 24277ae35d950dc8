"""The hash chain that names a block's content: its own tokens and all that precede them."""

import hashlib
import struct
from array import array
from collections.abc import Sequence

from services.prompt import MediaSpan

HASH_BYTES = 16


def root_hash(salt: str) -> bytes:
    """Where a chain starts. Chains of different salts never meet."""
    return hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"baton-kv-root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int], media: bytes = b"") -> bytes:
    """The link after `parent` for a full block of `token_ids`, with what `media_key` says of it."""
    return hashlib.blake2b(parent + array("I", token_ids).tobytes() + media, digest_size=HASH_BYTES).digest()


def media_key(media: Sequence[MediaSpan], start: int, end: int) -> bytes:
    """Which media stand at the tokens `start:end`, and which rows of them; empty where there are none."""
    inside = [span for span in media if span.start < end and start < span.end]
    return b"".join(
        struct.pack("<qqI", span.start - start, span.end - start, len(span.digest)) + span.digest for span in inside
    )


class HashChain:
    """The links of a growing sequence's full blocks, each computed once."""

    __slots__ = ("_block_tokens", "_links", "_media", "_root")

    def __init__(self, salt: str, block_tokens: int, media: Sequence[MediaSpan] = ()) -> None:
        self._root = root_hash(salt)
        self._block_tokens = block_tokens
        self._media = media
        self._links: list[bytes] = []

    def upto(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """The links of the full blocks in the first `num_tokens` tokens. Tokens may be appended, never changed."""
        full = num_tokens // self._block_tokens
        while len(self._links) < full:
            start = len(self._links) * self._block_tokens
            parent = self._links[-1] if self._links else self._root
            end = start + self._block_tokens
            self._links.append(block_hash(parent, token_ids[start:end], media_key(self._media, start, end)))
        return self._links[:full]

    def value(self, token_ids: Sequence[int], num_tokens: int) -> bytes:
        """The last link of those blocks, or the root where there is none."""
        links = self.upto(token_ids, num_tokens)
        return links[-1] if links else self._root
