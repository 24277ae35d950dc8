"""The hash chain that names a block's content: its own tokens and all that precede them."""

import hashlib
from array import array
from collections.abc import Sequence

HASH_BYTES = 16


def root_hash(salt: str) -> bytes:
    """Where a chain starts. Chains of different salts never meet."""
    return hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"baton-kv-root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The link after `parent` for a full block of `token_ids`."""
    return hashlib.blake2b(parent + array("I", token_ids).tobytes(), digest_size=HASH_BYTES).digest()


class HashChain:
    """The links of a growing sequence's full blocks, each computed once."""

    __slots__ = ("_block_tokens", "_links", "_root")

    def __init__(self, salt: str, block_tokens: int) -> None:
        self._root = root_hash(salt)
        self._block_tokens = block_tokens
        self._links: list[bytes] = []

    def upto(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """The links of the full blocks in the first `num_tokens` tokens. Tokens may be appended, never changed."""
        full = num_tokens // self._block_tokens
        while len(self._links) < full:
            start = len(self._links) * self._block_tokens
            parent = self._links[-1] if self._links else self._root
            self._links.append(block_hash(parent, token_ids[start : start + self._block_tokens]))
        return self._links[:full]

    def value(self, token_ids: Sequence[int], num_tokens: int) -> bytes:
        """The last link of those blocks, or the root where there is none."""
        links = self.upto(token_ids, num_tokens)
        return links[-1] if links else self._root
