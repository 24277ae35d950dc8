"""Whose pool it is that others read, and how they read it."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.v1 import handoff_pb2

from rpc.errors import LayoutMismatch
from services.identity import Identity
from services.kv import KvLayout


@dataclass(frozen=True, slots=True)
class Owner:
    """A worker, and the layout of its blocks."""

    identity: Identity
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class OfferedPool:
    """A worker's pool, with the ways to read it in the order of choice."""

    owner: Owner
    num_blocks: int
    endpoints: Sequence[handoff_pb2.TransportEndpoint]


def pool_of(pools: Sequence[OfferedPool], digest: str) -> OfferedPool:
    """The pool of this layout. Raises LayoutMismatch naming the digests of those that there are."""
    for pool in pools:
        if pool.owner.layout.digest == digest:
            return pool
    owned = " and ".join(pool.owner.layout.digest for pool in pools)
    raise LayoutMismatch(f"worker {pools[0].owner.identity.worker_id} has KV layout {owned}; the reader's is {digest}")
