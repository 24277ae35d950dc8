"""The names that callers without authentication give themselves: a bounded number of them has accounts at a time."""

from collections import OrderedDict
from collections.abc import Callable, Collection

from runtime.clock import monotonic

OTHERS = "(others)"  # the account of further names
# An account that was not used for so long may become another name's, once all are taken.
IDLE_SECONDS = 300.0


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
