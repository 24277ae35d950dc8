"""Worker discovery: the Protocols that the registries in etcd, in a folder and in memory implement.

The registry's keys: `/baton/<namespace>/workers/<id>`, the same for routers, and `.../numbers/<kind>/<id>`.
"""

import re
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from baton.errors import ConfigError
from discovery.record import WorkerRecord

__all__ = ["AllocatedId", "Registration", "Registry", "WorkerRecord"]


DEFAULT_LEASE_SECONDS = 10.0
_ROUTER_LEASE_SECONDS = 4.0


def router_lease_seconds(worker_seconds: float) -> float:
    """A router's lease, where a worker's is so long: until it is over the others have a part of the quotas of which a
    router that has died is the home.
    """
    return min(worker_seconds, _ROUTER_LEASE_SECONDS)


class Registration(Protocol):
    """A worker's record, which is kept in the registry."""

    @property
    def registered(self) -> bool:
        """True if the record is in the registry now, as far as this process knows."""

    async def update(self, record: WorkerRecord) -> None:
        """Replaces the record. Raises ValueError if the worker id differs.

        Returns when the record is written; if the registry cannot be reached, after a few seconds, and the record is
        written once it is back.
        """


class AllocatedId(Protocol):
    """A small number that no other process holds while its context is open."""

    @property
    def value(self) -> int:
        """The id now. It may change after an outage of the registry, if another process got the old one."""


class Registry(Protocol):
    """A namespace of workers. Namespaces do not see each other's workers."""

    @property
    def routers(self) -> "Registry":
        """The routers of the same namespace, by the same records, of which they fill in name and address."""

    def register(self, record: WorkerRecord) -> AbstractAsyncContextManager[Registration]:
        """Keeps `record` registered while the context is open, also after losses; removes it at the end.

        Entering waits for the first registration. It raises Unavailable if that takes too long, Unauthenticated or
        PermissionDenied at once if the registry refuses this process, and ConfigError if the worker id cannot be part
        of a key. After that nothing is raised: see `Registration.registered`. Of two processes with one worker id the
        one of the higher epoch stays registered.
        """

    async def next_epoch(self, worker_id: str) -> int:
        """An epoch for a process that is about to register: higher than the registered one's, if there is one.

        Raises Unavailable if the registry cannot be reached, and ConfigError if the id cannot be part of a key.
        """

    def allocate_id(self, kind: str, limit: int) -> AbstractAsyncContextManager[AllocatedId]:
        """A number in [0, limit) that no other process of this namespace holds for this kind.

        Entering raises Unavailable if the registry cannot be reached, or if all ids are in use. Raises ConfigError if
        `kind` cannot be part of a key.
        """

    def watch(self) -> AsyncGenerator[tuple[WorkerRecord, ...], None]:
        """Yields all registered workers, at once and after every change.

        Changes that come while the reader is busy are merged. While the registry cannot be reached nothing is yielded,
        so the reader keeps its last view. Raises Unauthenticated or PermissionDenied if the registry refuses this
        process from the start. Close it after use: `async with aclosing(registry.watch()) as views: ...`.
        """


Group = Literal["workers", "routers"]

# No slash: with one, a namespace could contain another's keys.
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,200}")


class WorkerKeys:
    """The keys of one namespace. Raises ConfigError for a namespace that cannot be part of a key."""

    def __init__(self, namespace: str, group: Group = "workers") -> None:
        self.namespace = namespace
        self._namespace = f"/baton/{_checked('namespace', namespace)}"
        self.prefix = f"{self._namespace}/{group}/".encode()
        self.end = end_of(self.prefix)

    def ids(self, kind: str) -> bytes:
        """The prefix of the keys of one kind of allocated ids. Raises ConfigError if `kind` cannot be part of a key."""
        return f"{self._namespace}/numbers/{_checked('kind', kind)}/".encode()

    def of(self, worker_id: str) -> bytes:
        """The key of a worker. Raises ConfigError if its id cannot be part of a key."""
        return self.prefix + _checked("worker_id", worker_id).encode()


def end_of(prefix: bytes) -> bytes:
    """The end of the range of keys with this prefix, which ends in a slash."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _checked(what: str, name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{what}: {name!r:.100} must be 1 to 200 letters, digits, dots, colons, dashes or underscores"
        )
    return name
