"""The records in memory: bounded by bytes, of a tenant and of all; the oldest go first.

Records in files: each a bundle of its own. Together they are bounded by bytes, and the oldest go first.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import TypeVar

from baton import records
from baton.errors import ConfigError
from baton.inference.v1 import record_pb2
from router.config import RecordsConfig
from router.telemetry import metrics

_ENTRY_BYTES = 1280  # of an entry's own objects, as measured where each is of another tenant
# Of one id: to write them as one message, or to read one of them, takes a few milliseconds.
_MOST_FOUND, _MOST_FOUND_BYTES = 4, 2**20

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class _Kept:
    number: int
    request_id: str
    tenant: str
    serialized: bytes

    @property
    def size(self) -> int:
        return _ENTRY_BYTES + len(self.serialized)


class RecordTable:
    """The records of a router, serialized."""

    def __init__(self, config: RecordsConfig) -> None:
        self._config = config
        self._numbers = count()
        self._tenants: dict[str, OrderedDict[int, _Kept]] = {}
        self._tenant_bytes: dict[str, int] = {}
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._by_request: dict[str, dict[int, _Kept]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def of_tenant(self, tenant: str) -> int:
        """The bytes of those of a tenant."""
        return self._tenant_bytes.get(tenant, 0)

    def add(self, record: record_pb2.RequestRecord) -> bool:
        """Keeps a record, and drops older ones for it. False if it is larger than all of a tenant may be."""
        kept = _Kept(next(self._numbers), record.request_id, record.tenant, record.SerializeToString())
        if kept.size > min(self._config.tenant_bytes, self._config.max_bytes):
            return False
        self._kept[kept.number] = kept
        self._tenants.setdefault(kept.tenant, OrderedDict())[kept.number] = kept
        self._by_request.setdefault(kept.request_id, {})[kept.number] = kept
        self._count(kept, kept.size)
        while self.of_tenant(kept.tenant) > self._config.tenant_bytes:
            self._drop(next(iter(self._tenants[kept.tenant].values())))
        while self.num_bytes > self._config.max_bytes:
            self._drop(next(iter(self._kept.values())))
        return True

    def find(self, request_id: str, tenant: str | None) -> list[bytes]:
        """The latest records of a tenant's request, or, if that is None, of any; serialized, the oldest first."""
        found = [
            one.serialized for one in self._by_request.get(request_id, {}).values() if tenant in (None, one.tenant)
        ]
        return _last(found, len)

    def _drop(self, kept: _Kept) -> None:
        del self._kept[kept.number]
        for entries, key in ((self._tenants, kept.tenant), (self._by_request, kept.request_id)):
            del entries[key][kept.number]
            if not entries[key]:
                del entries[key]
        self._count(kept, -kept.size)
        metrics.RECORDS_DROPPED.labels("memory").inc()

    def _count(self, kept: _Kept, more: int) -> None:
        self.num_bytes += more
        left = self._tenant_bytes.pop(kept.tenant, 0) + more
        if left:
            self._tenant_bytes[kept.tenant] = left
        metrics.RECORD_BYTES.set(self.num_bytes)


def latest(records: list[record_pb2.RequestRecord]) -> list[record_pb2.RequestRecord]:
    """The latest of some records, as many as fit into one message; the oldest first."""
    ordered = sorted(records, key=lambda one: one.arrived.ToNanoseconds())
    return _last(ordered, record_pb2.RequestRecord.ByteSize)


def _last(records: Sequence[Record], size_of: Callable[[Record], int]) -> list[Record]:
    """The last ones that an answer may have: the very last one, however large."""
    sums = accumulate(size_of(one) for one in reversed(records[-_MOST_FOUND:]))
    num_records = max(1, sum(total <= _MOST_FOUND_BYTES for total in sums))
    return list(records[-num_records:])


_PATTERN = "record-*"
_LEAST_BYTES = 4096  # of a file, as disks have them: it bounds their number, too
_PARTS = 16


class RecordFolder:
    """A folder of records, of one router or several. Its files can be read by its owner alone."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises ConfigError if nothing can be written there."""
        self._path = path
        self._max_bytes = max_bytes
        self._room = 0  # what may be written until the files are listed again
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"records.folder: {path}: {error.strerror}") from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"records.folder: {path}: cannot be written")

    def write(self, record: record_pb2.RequestRecord) -> None:
        """Writes a record, and removes the oldest ones beyond the bound. Raises OSError."""
        # By the router's own id of the record: a client's id of the request is no name of a file.
        path = self._path / f"record-{record.arrived.ToNanoseconds():020d}-{record.record_id}.json"
        partial = path.with_suffix(".partial")
        bundle = records.write_bundle([record])
        self._make_room(max(len(bundle), _LEAST_BYTES))
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(bundle)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def _make_room(self, size: int) -> None:
        """Removes the oldest files once a part of the bound has been written: to list them takes long."""
        self._room -= size
        if self._room >= 0:
            return
        part = self._max_bytes // _PARTS
        # By their names, which begin with the time. A process that has ended may have left partial ones.
        for file in sorted(self._path.glob(_PATTERN), reverse=True):
            with suppress(FileNotFoundError):  # another router has removed it
                size += max(file.stat().st_size, _LEAST_BYTES)
                if size > self._max_bytes - part:
                    file.unlink()
        self._room = part
