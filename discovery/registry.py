"""Where workers make themselves known: the Protocol that etcd and memory fulfil."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from discovery.record import WorkerRecord

__all__ = ["Number", "Registration", "Registry", "WorkerRecord"]


class Registration(Protocol):
    """A record that is being kept in the registry."""

    @property
    def registered(self) -> bool:
        """Whether the record is, as far as can be known here, in the registry now."""

    async def update(self, record: WorkerRecord) -> None:
        """Replaces the record; it must have the same worker id, else ValueError.

        Returns when it is written. While the registry cannot be reached it returns after a few seconds, and the record
        is written when the registry is back.
        """


class Number(Protocol):
    """A number that is ours for as long as its context is open."""

    @property
    def value(self) -> int:
        """The number now. It can change: after an outage of the registry another process may have the old one."""


class Registry(Protocol):
    """A namespace of workers. Two namespaces never see each other's."""

    def register(self, record: WorkerRecord) -> AbstractAsyncContextManager[Registration]:
        """Keeps `record` registered while the context is open, healing it after every loss; removes it at the end.

        Entering waits until it is registered for the first time, and raises Unavailable if that takes too long,
        Unauthenticated or PermissionDenied at once if the registry refuses us. Once entered nothing is raised any more:
        `Registration.registered` says how it stands. Of two processes under one worker id the higher epoch stays.
        Raises ConfigError if the worker id cannot be a part of a key.
        """

    def number(self, kind: str, limit: int) -> AbstractAsyncContextManager["Number"]:
        """A number from 0 up to, not including, `limit` that no other process of this namespace has of this kind.

        Entering raises Unavailable if the registry cannot be reached, or if all numbers are taken. Raises ConfigError
        if the kind cannot be a part of a key.
        """

    def watch(self) -> AsyncGenerator[tuple[WorkerRecord, ...], None]:
        """The whole set of registered workers, at once and after every change, for as long as it is read.

        Changes that come while the reader is busy are merged. While the registry cannot be reached nothing is yielded:
        the reader keeps its last view. Raises Unauthenticated or PermissionDenied if the registry refuses us from the
        start. Close it after use: `async with aclosing(registry.watch()) as views: ...`.
        """
