"""The Protocols of transports, which move KV blocks between pools, and of the pools that they open.

docs/extending.md has an example.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import Field
from typing_extensions import Self

from baton.engine.v1 import handoff_pb2
from rpc.auth.tls import TlsConfig
from runtime.config import Section
from services.engines.kv import BlockMemory

Endpoint = handoff_pb2.TransportEndpoint


class TransportUnavailable(Exception):
    """This transport cannot read a pool; another one may."""


class TransferFailed(Exception):
    """The bytes did not arrive, or not all of them."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of blocks `source` of an owner's pool to blocks `destination` of `memory`, one to one.

    All ids have been checked. `deadline` is of the monotonic clock. `handoff_id` is the lease on the source.
    """

    source: Sequence[int]
    memory: BlockMemory
    destination: Sequence[int]
    deadline: float
    handoff_id: str = field(default="", repr=False)

    @property
    def num_bytes(self) -> int:
        return len(self.source) * self.memory.block_bytes


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The size of a pool."""

    num_blocks: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


class ReadGuard(Protocol):
    """Decides which blocks of an owner's pool a reader may read."""

    def may_read(self, handoff_id: str, certificate: str, block_ids: Collection[int]) -> bool:
        """True if a handoff that is held now covers these blocks and allows this certificate.

        `certificate` is empty for a reader without one. Safe on every thread.
        """


@dataclass(frozen=True, slots=True)
class Exposure:
    """The address and the readers of a pool. `tls` encrypts connections; mutual TLS admits workers only."""

    listen_host: str
    advertised_host: str
    guard: ReadGuard
    tls: TlsConfig | None = None


class TransportOptions(Section):
    """The section of `transport_options` for one transport. A transport adds its own fields in a subclass."""

    unencrypted: bool = Field(default=False, description="Allows a transport without TLS where the worker has TLS.")


@dataclass(frozen=True, slots=True)
class TransportContext:
    """The arguments that open a transport: its options, and the TLS for connections to owners.

    `memory` is the pool that KV is pulled into; embeddings are pulled into other memory.
    """

    options: Any = field(default_factory=TransportOptions)
    tls: TlsConfig | None = None
    memory: BlockMemory | None = None


class PoolReader(Protocol):
    """An owner's pool, opened for reading."""

    async def pull(self, transfer: Transfer) -> None:
        """Copies the blocks and commits them. Raises TransferFailed.

        After it has ended, for whatever reason, also by cancellation, nothing writes into the destination.
        """

    def close(self) -> None:
        """Frees the pool. No pull is running any more."""
        return


class Transport(Protocol):
    """Moves blocks from an owner's pool to a reader's. Each worker has one instance, for both sides.

    An async context manager: entering raises ConfigError if the transport cannot be used here; leaving ends its offers
    and its threads.
    """

    name: str  # a class attribute: unique, and equal on both sides
    supports_tls: bool  # a class attribute: true also if bytes never leave the host
    # A class attribute: whether it can read a handoff's first blocks while its owner writes others of the pool.
    reads_early: bool = False
    options: type[TransportOptions] = TransportOptions

    def __init__(self, context: TransportContext) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        return

    async def offer(self, memory: BlockMemory, exposure: Exposure) -> Endpoint | None:
        """Makes a pool readable until the transport is closed. Returns None if it cannot offer this memory.

        If the owner takes no part in reads, the guard cannot be applied: a reader of the endpoint may then read the
        whole pool.
        """

    async def open(self, endpoint: Endpoint, shape: PoolShape) -> PoolReader:
        """Opens an owner's pool, once an epoch. Raises TransportUnavailable if it cannot be read from here."""


def transport_of(endpoint: Endpoint) -> str:
    """Returns the name of the endpoint's transport; empty for one of a newer version."""
    name = endpoint.WhichOneof("endpoint") or ""
    return endpoint.custom.transport if name == "custom" else name
