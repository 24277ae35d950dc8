"""The hash chain that names a KV block's content: its own tokens and all that precede them.

Engines and routers compute it alike, so that a router knows a prompt's blocks by the names that workers tell. Tenants
and sessions, whose names stay with the routers, have digests on workers.
"""

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

from runtime.threads import MANY_IDS, in_pieces

HASH_BYTES = 16
TOKEN_BYTES = array("I").itemsize


class MediaPlace(Protocol):
    """A medium's place in a prompt: tokens `start:start + num_tokens`, by the digest of its embedding."""

    @property
    def start(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def digest(self) -> bytes: ...


def root_hash(salt: str, lora: str = "") -> bytes:
    """The start of a chain. Chains of different salts, or of different adapters, never meet.

    `lora` is the adapter's digest and name, `digest:name`; empty without one.
    """
    if not lora:
        return hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"baton-kv-root").digest()
    content = lora.encode()
    content = struct.pack("<q", len(content)) + content + salt.encode()
    return hashlib.blake2b(content, digest_size=HASH_BYTES, person=b"baton-kv-lora").digest()


def block_hash(parent: bytes, token_ids: Sequence[int], media: bytes = b"") -> bytes:
    """The link after `parent` for a block of `token_ids`, with what `media_key` says of it."""
    return _link(parent, array("I", token_ids).tobytes() + media)


def media_key(media: Iterable[MediaPlace], start: int, end: int) -> bytes:
    """Which media stand at the tokens `start:end`, and which rows of them; empty where there are none."""
    inside = [span for span in media if span.start < end and start < span.start + span.num_tokens]
    return b"".join(
        struct.pack("<qqI", span.start - start, span.start + span.num_tokens - start, len(span.digest)) + span.digest
        for span in inside
    )


def block_hashes(
    token_ids: Sequence[int], block_tokens: int, salt: str = "", media: Sequence[MediaPlace] = (), lora: str = ""
) -> list[bytes]:
    """The links of all full blocks of a prompt, about a microsecond each."""
    content = token_bytes(token_ids)
    if not media:
        return extend_chain(root_hash(salt, lora), content, block_tokens)
    width = TOKEN_BYTES * block_tokens
    parent, hashes = root_hash(salt, lora), []
    for index in range(len(token_ids) // block_tokens):
        key = media_key(media, index * block_tokens, (index + 1) * block_tokens)
        parent = _link(parent, content[index * width : (index + 1) * width] + key)
        hashes.append(parent)
    return hashes


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """The ids as `extend_chain` takes them: what an array of them has, in half the time."""
    if len(token_ids) <= MANY_IDS:
        return _packing(len(token_ids)).pack(*token_ids)
    return b"".join(_packing(len(piece)).pack(*piece) for piece in in_pieces(token_ids))


def extend_chain(parent: bytes, content: bytes, block_tokens: int) -> list[bytes]:
    """The links after `parent` for the full blocks of `content`, the bytes of ids without media."""
    width, hashes = TOKEN_BYTES * block_tokens, []
    blake2b = hashlib.blake2b  # a local name, and no call of `_link`: routers hash every prompt
    for end in range(width, len(content) + 1, width):
        parent = blake2b(parent + content[end - width : end], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


@lru_cache(1024)
def _packing(count: int) -> struct.Struct:
    return struct.Struct(f"{count}I")


def _link(parent: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(parent + content, digest_size=HASH_BYTES).digest()


def tenant_digest(tenant: str) -> bytes:
    """A tenant's name on workers."""
    return _digest(tenant)


def session_digest(tenant: str, session: str) -> bytes:
    """A session's name on workers: the same key of another tenant has another one."""
    return _digest(tenant, session)


def _digest(*texts: str) -> bytes:
    joined = b"".join(blake2b(text.encode("utf-8", "replace"), digest_size=16).digest() for text in texts)
    return blake2b(joined, digest_size=16).digest()
