"""The tenant and the priority of a call: read from its metadata, and the names that have accounts of their own."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from baton.connection.credentials import PRIORITY_KEY, TENANT_KEY
from baton.errors import InvalidRequest
from rpc.auth.caller import Caller
from runtime.clock import monotonic

OTHERS = "(others)"  # the account of further names
# An account that was not used for so long may become another name's, once all are taken.
IDLE_SECONDS = 300.0
_MAX_PRIORITY = 10
_LONGEST_TENANT = 128

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class RequestQos:
    """The tenant that a request is charged to, and its priority. Higher priorities go first."""

    tenant: str = ""  # empty for an unnamed caller
    priority: int = 0
    shares_account: bool = False  # with other unauthenticated tenants

    @property
    def account(self) -> str:
        """The tenant that quotas and the queue count it for."""
        return OTHERS if self.shares_account else self.tenant

    @classmethod
    def read(
        cls, metadata: Metadata | None, caller: Caller | None = None, proxies: frozenset[str] = frozenset()
    ) -> "RequestQos":
        """Reads the metadata of a call. An authenticated caller is its own tenant; `proxies` may name others.

        Raises InvalidRequest naming the wrong key.
        """
        values = {key: str(value) for key, value in metadata or () if key in (TENANT_KEY, PRIORITY_KEY)}
        if not values and caller is None:
            return _UNNAMED
        return cls(_tenant(values.get(TENANT_KEY, ""), caller, proxies), _priority(values.get(PRIORITY_KEY, "")))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that passes it on to a worker."""
        if not self.tenant and not self.priority:
            return ()
        return ((TENANT_KEY, self.tenant), (PRIORITY_KEY, str(self.priority)))


_UNNAMED = RequestQos()


class UnauthenticatedTenants:
    """Decides which names have an account of their own. Anyone can make up names, and each new one would be next.

    `known` names, and callers without a name, always have one.
    """

    def __init__(self, most: int = 256, known: Collection[str] = (), clock: Callable[[], float] = monotonic) -> None:
        self._most = most
        self._known = frozenset(("", *known))
        self._clock = clock
        self._used_at: OrderedDict[str, float] = OrderedDict()  # least recently used first

    def has_account(self, name: str) -> bool:
        """True if a request of this name, which it notes, is counted for it alone."""
        if name in self._known:
            return True
        if name not in self._used_at and not self._has_room():
            return False
        self._used_at[name] = self._clock()
        self._used_at.move_to_end(name)
        return True

    def _has_room(self) -> bool:
        if len(self._used_at) < self._most:
            return True
        oldest, used_at = next(iter(self._used_at.items()))
        if self._clock() < used_at + IDLE_SECONDS:
            return False
        del self._used_at[oldest]
        return True


def _tenant(name: str, caller: Caller | None, proxies: frozenset[str]) -> str:
    if caller is not None and caller.name not in proxies:
        return caller.name
    # gRPC accepts more characters from clients than it sends to workers.
    if len(name) > _LONGEST_TENANT or not (name.isascii() and name.isprintable()):
        raise InvalidRequest.of(TENANT_KEY, f"must be at most {_LONGEST_TENANT} printable ASCII characters")
    return name or (caller.name if caller else "")


def _priority(text: str) -> int:
    if not text:
        return 0
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 2) or int(digits) > _MAX_PRIORITY:
        raise InvalidRequest.of(PRIORITY_KEY, f"must be a whole number from -{_MAX_PRIORITY} to {_MAX_PRIORITY}")
    return int(text)
