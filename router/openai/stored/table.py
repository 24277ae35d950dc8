"""All kept responses of a router: whose they are, how long they stay, and what they may take together."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from baton.errors import InvalidRequest, Overloaded, QuotaExceeded, RequestNotFound
from baton.inference.v1 import generate_pb2
from router.config import StoredResponsesConfig
from router.openai.stored.document import ResponseDocument
from router.routing.latency import Clock
from router.telemetry import metrics

_ENTRY_BYTES = 2048  # of its own objects
_LOOKED_AT = 8  # of the least recently used, whether they are too old
# Of a conversation. An id that a client has chosen may even name a response that goes on from itself.
_MOST_BEFORE = 1024
_RETRY_SECONDS = 1.0
_SHOWN = 12  # characters of an id, in errors: more of one in the background is its secret
_NOT_HERE = (
    "no response {id!r} is kept here: it was made without `store: true` or `background: true`, has been dropped, "
    "belongs to another tenant, or is on another router"
)


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A kept response. `task` runs it, if it is in the background."""

    identity: str
    owner: bytes
    tenant: str
    document: ResponseDocument
    # Of its request, beyond those of the response that it goes on from; None if another router had them.
    turns: Sequence[generate_pb2.ChatMessage] | None
    previous: str = ""
    is_background: bool = False
    task: "asyncio.Task[None] | None" = None
    size: int = 0
    stored_at: float = field(default=0.0)

    def measure(self) -> int:
        """The bytes that it takes."""
        return _ENTRY_BYTES + sum(turn.ByteSize() for turn in self.turns or ()) + self.document.num_bytes

    @property
    def conversation(self) -> Sequence[generate_pb2.ChatMessage]:
        """Its own turns and its output, which has ended."""
        return (*(self.turns or ()), self.document.answer)


class StoredResponses:
    """The table. Bounded by bytes, of a tenant and of all, and in time; the least recently used go first."""

    def __init__(self, config: StoredResponsesConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes: dict[str, int] = {}
        self._running: set[StoredResponse] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[StoredResponse]:
        return iter(tuple(self._entries.values()))

    @property
    def num_bytes(self) -> int:
        """The bytes of all together."""
        return sum(self._bytes.values())

    def of_tenant(self, tenant: str) -> int:
        """The bytes of those of a tenant."""
        return self._bytes.get(tenant, 0)

    def add(self, entry: StoredResponse) -> None:
        """Keeps a response, instead of its owner's of the same id.

        Raises InvalidRequest if it is larger than all of a tenant may be, or has another's id, and QuotaExceeded and
        Overloaded if too many run.
        """
        self.require_room(entry)
        if (before := self._entries.get(entry.identity)) is not None:
            if before.owner != entry.owner:
                raise InvalidRequest.of("store", "the response has the id of another")
            self.drop(before)
        if not entry.document.has_ended:
            self._require_running_room(entry)
            self._running.add(entry)
        entry.stored_at = self._clock()
        self._entries[entry.identity] = entry
        self.update(entry)

    def require_room(self, entry: StoredResponse) -> None:
        """Raises InvalidRequest if a response is larger than all of a tenant may be."""
        size, most = entry.measure(), self._config.tenant_bytes
        if size > most:
            raise InvalidRequest.of("store", f"the response takes {size} bytes; {most} are kept for a tenant")

    def _require_running_room(self, entry: StoredResponse) -> None:
        """Raises if too many run, or too large ones, since none of them can be dropped for others.

        QuotaExceeded if they are the tenant's own, else Overloaded.
        """
        size, config = entry.measure(), self._config
        own = [one.size for one in self._running if one.tenant == entry.tenant]
        if len(own) >= config.tenant_running or size + sum(own) > config.tenant_bytes:
            text = "as many responses of the tenant run in the background as may"
            raise QuotaExceeded(text, subject=entry.tenant, retry_after_seconds=_RETRY_SECONDS)
        all_bytes = sum(one.size for one in self._running)
        if len(self._running) >= config.max_running or size + all_bytes > config.max_bytes:
            text = "as many responses run in the background as may"
            raise Overloaded(text, retry_after_seconds=_RETRY_SECONDS)

    def update(self, entry: StoredResponse) -> None:
        """Counts what a response takes now, and drops what is too much."""
        if self._entries.get(entry.identity) is not entry:
            return
        self._count(entry, entry.measure() - entry.size)
        if entry.document.has_ended and entry in self._running:
            self._running.discard(entry)
            entry.stored_at = self._clock()
        self._drop_old()
        self._drop_over(self._config.tenant_bytes, entry.tenant)
        self._drop_over(self._config.max_bytes, None)

    def get(self, identity: str, owner: bytes) -> StoredResponse:
        """A response of its owner. Raises RequestNotFound."""
        entry = self._entries.get(identity)
        if entry is None or entry.owner != owner or self._is_old(entry):
            raise RequestNotFound(_NOT_HERE.format(id=identity[:_SHOWN]))
        self._entries.move_to_end(identity)
        return entry

    def chain(self, identity: str, owner: bytes) -> Sequence[StoredResponse]:
        """The responses of a conversation up to one of them. Raises InvalidRequest."""
        found: list[StoredResponse] = []
        while identity:
            if len(found) >= _MOST_BEFORE:
                text = f"goes on from more than {_MOST_BEFORE} responses: send the conversation"
                raise InvalidRequest.of("previous_response_id", text)
            found.append(self._previous(identity, owner))
            identity = found[-1].previous
        return found[::-1]

    def _previous(self, identity: str, owner: bytes) -> StoredResponse:
        try:
            entry = self.get(identity, owner)
        except RequestNotFound as error:
            raise InvalidRequest.of("previous_response_id", error.message) from None
        if entry.document.status not in ("completed", "incomplete"):
            raise InvalidRequest.of("previous_response_id", f"its status is {entry.document.status}")
        if entry.turns is None:
            text = "was begun by another router, which has its input: send the conversation"
            raise InvalidRequest.of("previous_response_id", text)
        return entry

    def drop(self, entry: StoredResponse) -> None:
        """Forgets a response."""
        if self._entries.get(entry.identity) is entry:
            self._running.discard(entry)
            del self._entries[entry.identity]
            self._count(entry, -entry.size)

    def _count(self, entry: StoredResponse, more: int) -> None:
        entry.size += more
        left = self._bytes.get(entry.tenant, 0) + more
        if left:
            self._bytes[entry.tenant] = left
        else:
            self._bytes.pop(entry.tenant, None)
        metrics.STORED_RESPONSES.set(len(self))
        metrics.STORED_RESPONSE_BYTES.set(self.num_bytes)

    def _is_old(self, entry: StoredResponse) -> bool:
        return entry.document.has_ended and self._clock() - entry.stored_at > self._config.seconds

    def _drop_old(self) -> None:
        for entry in tuple(islice(self._entries.values(), _LOOKED_AT)):
            if self._is_old(entry):
                self.drop(entry)

    def _drop_over(self, most: int, tenant: str | None) -> None:
        """Drops responses of a tenant, or of all, until they fit; those that run stay, they are bounded by number."""
        taken = self.num_bytes if tenant is None else self.of_tenant(tenant)
        if taken <= most:
            return
        for entry in tuple(self._entries.values()):
            if taken <= most:
                return
            if entry.document.has_ended and tenant in (None, entry.tenant):
                taken -= entry.size
                self.drop(entry)
