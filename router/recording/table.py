"""The records in memory: bounded by bytes, of a tenant and of all; the oldest go first."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import TypeVar

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
