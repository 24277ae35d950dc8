"""The file descriptors of a process, and the connections of clients, which leave some of them to everything else."""

import heapq
import resource
from collections.abc import Collection
from typing import Final, Protocol

import structlog

from baton_http2.clock import monotonic

log = structlog.get_logger(__name__)

# With fewer than this a router runs out of them before it runs out of anything else.
_FEW: Final = 8192
_MANY: Final = 2**20  # where there is no limit
# Of a small limit, the part that is kept from connections at most.
_LARGEST_RESERVE: Final = 0.25
# Of all connections, how many that are idle are closed at once when there is no room left.
_CLOSED_AT_ONCE: Final = 1 / 32
_WARN_SECONDS: Final = 60.0


def raise_limit() -> None:
    """Raises the limit of this process to the highest that it may set itself; warns if that is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:
            log.debug("the limit of file descriptors cannot be raised", soft=soft, hard=hard, error=str(error))
    if limit() < _FEW:
        log.warning(
            "few file descriptors: they bound how many clients may be connected; raise the hard limit (ulimit -Hn)",
            limit=limit(),
        )


def limit() -> int:
    """The number of descriptors that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY if soft == resource.RLIM_INFINITY else soft


class OpenConnection(Protocol):
    """A client's connection, as the limit of all knows it."""

    def idle_since(self) -> float | None:
        """The loop's time since which nothing has run on it; None if something does."""

    def close_idle(self) -> None:
        """Closes it, soon."""


def longest_idle(connections: Collection[OpenConnection]) -> list[OpenConnection]:
    """A few of the connections that have been idle for the longest time, the longest first."""
    times = [(each.idle_since(), number, each) for number, each in enumerate(connections)]
    idle = [(since, number, each) for since, number, each in times if since is not None]
    return [each for _, _, each in heapq.nsmallest(max(1, int(len(connections) * _CLOSED_AT_ONCE)), idle)]


class OpenConnections:
    """The clients' connections of a process, which leave `reserved` descriptors free, or a quarter of a low limit.

    The kernel gives the lowest number that is free: at least as many as that of a new connection are open.
    """

    def __init__(self, reserved: int) -> None:
        highest = limit()
        reserve = min(reserved, int(highest * _LARGEST_RESERVE))
        self.most = highest - reserve
        self._never = highest - reserve // 2
        self._open: dict[OpenConnection, None] = {}
        self._closing = 0
        self._warned_at = float("-inf")

    def add(self, connection: OpenConnection) -> None:
        """A connection is there."""
        self._open[connection] = None

    def discard(self, connection: OpenConnection) -> None:
        """It is not any more."""
        self._open.pop(connection, None)

    def has_capacity(self, descriptor: int) -> bool:
        """True if a new connection with this descriptor may stay; others that are idle may be closed for it."""
        # Below the number of one that is new there may be some that are free, of connections that have gone.
        is_full = len(self._open) >= self.most
        if descriptor < self.most and not is_full:
            return True
        self._warn()
        # What was closed may have freed descriptors of the reserve alone, where something else holds many.
        if is_full or not self._closing or descriptor >= self._never:
            self.close_idle()
        if not self._closing or descriptor >= self._never:
            return False
        self._closing -= 1
        return True

    def close_idle(self) -> None:
        """Closes some of the connections that have been idle for the longest time."""
        chosen = longest_idle(self._open)
        for each in chosen:
            self._open.pop(each, None)
            each.close_idle()
        self._closing = len(chosen)

    def _warn(self) -> None:
        now = monotonic()
        if now - self._warned_at > _WARN_SECONDS:
            self._warned_at = now
            log.warning("connections of clients have used up the file descriptors for them", most=self.most)
