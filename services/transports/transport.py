"""How KV blocks move: the Protocols that every transport fulfils."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.engine.v1 import handoff_pb2

from services.kv import BlockMemory


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks `source` of another pool that are to become blocks `destination` of `memory`, one by one.

    All ids are checked already. `deadline` is of the monotonic clock.
    """

    source: Sequence[int]
    memory: BlockMemory
    destination: Sequence[int]
    deadline: float

    @property
    def num_bytes(self) -> int:
        return len(self.source) * self.memory.block_bytes


class TransportUnavailable(Exception):
    """A pool cannot be read in this way; another may do."""


class TransferFailed(Exception):
    """The bytes did not arrive, or not all of them."""


class PoolReader(Protocol):
    """One other pool, opened for reading."""

    async def pull(self, transfer: Transfer) -> None:
        """Copies, and commits. Raises TransferFailed.

        However it ends, also by cancellation, nothing writes into the destination any more once it has ended.
        """

    def close(self) -> None:
        """Lets go of the pool. Nothing is being pulled then."""


class Transport(Protocol):
    """A way to read other processes' pools. A context manager: leaving ends its threads."""

    @property
    def name(self) -> str: ...

    async def open(self, endpoint: handoff_pb2.TransportEndpoint, num_blocks: int, block_bytes: int) -> PoolReader:
        """Opens a pool of this shape, once an epoch. Raises TransportUnavailable if it cannot be read from here."""
