"""Where workers make themselves known: the worker record, and the Protocol that etcd and memory fulfil."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker as others find it. `epoch` is of its process: another epoch is another process under the same id."""

    worker_id: str
    epoch: int
    address: str  # host:port of its gRPC server
    roles: tuple[str, ...]  # encode, prefill, decode
    model: str
    engine: str
    layout_digest: str
    max_context_tokens: int
    capabilities: tuple[str, ...] = ()
    data_parallel_ranks: int = 1
    draining: bool = False

    def to_json(self) -> bytes:
        """The record as stored; unknown keys are for newer versions to add."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: bytes) -> "WorkerRecord":
        """Reads a stored record, ignoring keys it does not know. Raises ValueError naming what is missing or wrong."""
        raise NotImplementedError


class Registration(Protocol):
    """A record that is being kept in the registry."""

    @property
    def registered(self) -> bool:
        """Whether the record is, as far as can be known here, in the registry now."""

    async def update(self, record: WorkerRecord) -> None:
        """Replaces the record; it must have the same worker id."""


class Registry(Protocol):
    """A namespace of workers. Two namespaces never see each other's."""

    def register(self, record: WorkerRecord) -> AbstractAsyncContextManager[Registration]:
        """Keeps `record` registered while the context is open, healing it after every loss; removes it at the end.

        Entering waits until it is registered for the first time, and raises Unavailable if that takes too long.
        """

    def watch(self) -> AsyncGenerator[tuple[WorkerRecord, ...], None]:
        """The whole set of registered workers, at once and after every change, for as long as it is read.

        Changes that come while the reader is busy are merged. While the registry cannot be reached nothing is yielded:
        the reader keeps its last view.
        """
