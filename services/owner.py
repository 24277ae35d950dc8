"""Whose pool it is that others read, and how they read it."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.v1 import handoff_pb2

from rpc.errors import LayoutMismatch
from services.engine import KvLayout
from services.identity import Identity


@dataclass(frozen=True, slots=True)
class Owner:
    """A worker, and the layout of its blocks."""

    identity: Identity
    layout: KvLayout

    def require_layout(self, digest: str) -> None:
        """Raises LayoutMismatch naming both digests."""
        if digest != self.layout.digest:
            raise LayoutMismatch(
                f"worker {self.identity.worker_id} has KV layout {self.layout.digest}; the reader's is {digest}"
            )


@dataclass(frozen=True, slots=True)
class OfferedPool:
    """A worker's pool, with the ways to read it in the order of choice."""

    owner: Owner
    num_blocks: int
    endpoints: Sequence[handoff_pb2.TransportEndpoint]
