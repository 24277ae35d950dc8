"""Who is registered, as seen by one watcher who may lose sight of the registry for a while."""

from collections.abc import Mapping

from discovery.record import WorkerRecord


class Membership:
    """The workers by key. While in doubt, who is gone is kept; who comes or changes is believed at once.

    After an outage leases may have expired, or data been lost, only because the registry was away: the workers live and
    need a moment to register again.
    """

    def __init__(self) -> None:
        self._records: dict[bytes, WorkerRecord] = {}
        self._absent: set[bytes] = set()
        self._in_doubt = False

    @property
    def workers(self) -> tuple[WorkerRecord, ...]:
        """Everyone, in the order of their keys."""
        return tuple(self._records[key] for key in sorted(self._records))

    def doubt(self) -> None:
        """From now on, until `settle`, nobody is taken for gone."""
        self._in_doubt = True

    def settle(self) -> None:
        """Ends the doubt: who is still absent is gone."""
        self._in_doubt = False
        for key in self._absent:
            self._records.pop(key, None)
        self._absent.clear()

    def replace(self, records: Mapping[bytes, WorkerRecord]) -> None:
        """Takes over a listing of everyone."""
        for key in self._records.keys() - records.keys():
            self.remove(key)
        for key, record in records.items():
            self.put(key, record)

    def put(self, key: bytes, record: WorkerRecord) -> None:
        """A worker has come, or has changed."""
        self._absent.discard(key)
        self._records[key] = record

    def remove(self, key: bytes) -> None:
        """A worker has gone; without effect if it was not there."""
        if self._in_doubt:
            self._absent.add(key)
        else:
            self._records.pop(key, None)
