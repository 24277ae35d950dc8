"""Which files of a folder are kept up to date by a living process."""

from collections.abc import Callable, Mapping

from discovery.file.folder import Version
from runtime.clock import monotonic

# After this many leases without a change a file is removed: its process is gone for good.
_LEASES_UNTIL_REMOVAL = 10


class Lifetimes:
    """When each file of a folder last changed, by the clock of this process.

    A file is alive for `ttl_seconds` after a change was seen, and after it was first seen: how old it was then cannot
    be known, for the clocks of two hosts may differ.
    """

    def __init__(self, ttl_seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._seen: dict[str, tuple[Version, float]] = {}

    def update(self, versions: Mapping[str, Version]) -> None:
        """Takes a listing of the folder."""
        now = self._clock()
        self._seen = {name: (version, self._changed_at(name, version, now)) for name, version in versions.items()}

    def extend(self, seconds: float) -> None:
        """Keeps every file alive for at least so long from now: during an outage no change could be seen."""
        changed = self._clock() + seconds - self._ttl_seconds
        self._seen = {name: (version, max(at, changed)) for name, (version, at) in self._seen.items()}

    def alive(self) -> list[str]:
        """The files that changed within the lease, by name."""
        now = self._clock()
        return sorted(name for name, (_, at) in self._seen.items() if now - at <= self._ttl_seconds)

    def expired(self) -> dict[str, Version]:
        """The files that have not changed for a lease."""
        now = self._clock()
        return {name: version for name, (version, at) in self._seen.items() if now - at > self._ttl_seconds}

    def abandoned(self) -> dict[str, Version]:
        """The files that have not changed for ten leases."""
        oldest = self._clock() - _LEASES_UNTIL_REMOVAL * self._ttl_seconds
        return {name: version for name, (version, at) in self._seen.items() if at < oldest}

    def _changed_at(self, name: str, version: Version, now: float) -> float:
        known = self._seen.get(name)
        return now if known is None or known[0] != version else known[1]
