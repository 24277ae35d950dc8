"""What engines tell of their prefix caches."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class KvStored:
    """Blocks that the prefix cache of a data-parallel rank holds from now on, by the hash chain of their prompts."""

    rank: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KvRemoved:
    """Blocks that it holds no more."""

    rank: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """All that it is known to hold; replaces what was told before."""

    rank: int
    block_hashes: tuple[bytes, ...]


KvChange = KvStored | KvRemoved | KvSnapshot


@runtime_checkable
class TellsKv(Protocol):
    """An engine that says what its prefix cache holds."""

    def kv_changes(self) -> AsyncGenerator[KvChange, None]:
        """Snapshots first, one for each rank, and then changes, without end. Raises Unsupported where it is off."""
