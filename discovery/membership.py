"""The registered workers, as one watcher sees them through outages of the registry."""

from collections.abc import Mapping

from discovery.record import WorkerRecord


class Membership:
    """The workers by key. While removals are held, removed workers stay; new and changed ones are applied at once.

    During an outage of the registry leases may expire, or data be lost, while the workers live; they need a moment to
    register again.
    """

    def __init__(self) -> None:
        self._records: dict[bytes, WorkerRecord] = {}
        self._removed: set[bytes] = set()
        self._holds_removals = False

    @property
    def workers(self) -> tuple[WorkerRecord, ...]:
        """All workers, in the order of their keys."""
        return tuple(self._records[key] for key in sorted(self._records))

    def hold_removals(self) -> None:
        """Keeps removed workers until `apply_removals`."""
        self._holds_removals = True

    def apply_removals(self) -> None:
        """Removes the workers that were removed meanwhile and have not come back."""
        self._holds_removals = False
        for key in self._removed:
            self._records.pop(key, None)
        self._removed.clear()

    def replace(self, records: Mapping[bytes, WorkerRecord]) -> None:
        """Replaces all workers by a listing."""
        for key in self._records.keys() - records.keys():
            self.remove(key)
        for key, record in records.items():
            self.put(key, record)

    def put(self, key: bytes, record: WorkerRecord) -> None:
        """Adds or changes a worker."""
        self._removed.discard(key)
        self._records[key] = record

    def remove(self, key: bytes) -> None:
        """Removes a worker, if it is there."""
        if self._holds_removals:
            self._removed.add(key)
        else:
            self._records.pop(key, None)
