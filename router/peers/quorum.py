"""The lender of a tenant's quota: the one router that more than half of them support at a time.

Each router supports, for a tenant, the router with the highest hash of those that it takes for alive, and tells all
that ask for how long it will. A router lends while such promises of more than half of the routers say that it is the
one, so that no two lend at the same time, however late their messages, views and event loops are (Gray and Cheriton,
Leases, 1989). A promise counts from when it was asked for, and is over for its giver only later.
"""

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import structlog

from baton.engine.v1 import peer_pb2
from router.routing.latency import Clock
from runtime.clock import monotonic

log = structlog.get_logger(__name__)

PROMISE_SECONDS = 0.7
_POLL_SECONDS = 0.2
_POLLED = 16  # routers, beyond which each is asked less often
_ALONE_SECONDS = 2.0  # for which a router without others may stand still: less than any registry's lease
_MOST_CHANGES = 32  # of a router's view that are remembered
_MOST_NAMES = 4096  # of routers in them all, whatever a router tells
_MOST_KEYS = 4096  # whose order and lender are remembered
_MOST_RANKED = 2**20  # routers of all keys together


@dataclass(slots=True)
class _View:
    """The routers that one router takes for alive: `changes` with the times since when, the latest last."""

    changes: deque[tuple[float, frozenset[str]]] = field(default_factory=lambda: deque(maxlen=_MOST_CHANGES))
    number: int = 0  # of the latest change
    joining: frozenset[str] = frozenset()
    joins: tuple[float, float] = (math.inf, math.inf)  # between these times they join
    until: float = -math.inf  # as long as this is promised

    @property
    def routers(self) -> frozenset[str]:
        return self.changes[-1][1] if self.changes else frozenset()

    def change(self, since: float, routers: frozenset[str], number: int) -> None:
        """Notes another view. Changes that were not told leave what was before unknown."""
        if number == self.number and self.changes:
            return
        if number != self.number + 1:
            self.changes.clear()
        self.changes.append((since, routers))
        self.number = number
        while len(self.changes) > 1 and sum(len(names) for _, names in self.changes) > _MOST_NAMES:
            self.changes.popleft()


class Quorum:
    """This router's view and promises, and those of the others. `members` are all routers that share quotas."""

    def __init__(self, own_id: str, clock: Clock = monotonic) -> None:
        self.is_registered: Callable[[], bool] = lambda: False
        self.next_change = asyncio.Event()  # of a view or promise, so that another router may lend
        self._own_id = own_id
        self._clock = clock
        self._members: tuple[str, ...] = (own_id,)
        self._own = _View(deque([(-math.inf, frozenset({own_id}))], _MOST_CHANGES))
        self._views: dict[str, _View] = {own_id: self._own}
        # As long as this router has promised to each; of itself, as long as it takes its event loop for running.
        self._promised = {own_id: math.inf}
        self._unaware: set[str] = set()  # of the members when this router was registered: may not know of it yet
        self._is_member = False
        self._was_member = False  # now or before
        self._member_since = -math.inf
        self._look_at = -math.inf
        self._known = frozenset({own_id})  # all that are in a view
        self._ranks: dict[str, tuple[str, ...]] = {}
        self._lends: dict[str, tuple[float, float]] = {}  # since when, and until when that is sure

    @property
    def may_lend(self) -> bool:
        """True if this router is registered, and all others of the first view with its record know it."""
        return self._is_member and not self._unaware

    @property
    def poll_seconds(self) -> float:
        """The time between two questions to a router."""
        return _POLL_SECONDS * max(1.0, len(self._members) / _POLLED)

    @property
    def promise_seconds(self) -> float:
        """For how long a promise holds; that of a router which does not ask for another one is over."""
        return PROMISE_SECONDS / _POLL_SECONDS * self.poll_seconds

    def set_members(self, members: Iterable[str]) -> None:
        """Takes a view of the registry; without this router if it is not registered.

        Before the first view that has it, a router may not know of others, and so neither lends nor promises.
        """
        was_member = self._is_member
        self._members = tuple(sorted(members))
        self._is_member = self._own_id in self._members
        for name in self._views.keys() - {*self._members, self._own_id}:
            del self._views[name]
        if self._is_member and not was_member:
            self._was_member, self._member_since = True, self._clock()
            self._unaware = set(self._members) - {self._own_id}
        self._set_unaware(self._unaware.intersection(self._members))
        self._know()
        self._changed()

    async def follow(self) -> None:
        """Notes that the event loop runs, until cancelled."""
        while True:
            self.note_awake()
            await asyncio.sleep(self.poll_seconds)

    def note_awake(self) -> None:
        """Notes that this router's event loop runs: one that stood still begins anew."""
        now = self._clock()
        self._refresh(now)
        self._promised[self._own_id] = now + (self.promise_seconds if len(self._members) > 1 else _ALONE_SECONDS)
        self._look_at = now

    # Promises.

    def answer(self, router: str, *, cannot_lend: bool = False) -> peer_pb2.PromiseResponse:
        """The promise to another router, which it shows to be alive by asking, unless it cannot lend: it would be
        supported instead of one that can.
        """
        now = self._clock()
        self._refresh(now)
        if router not in self._members:
            return peer_pb2.PromiseResponse()
        if not cannot_lend:
            self._promised[router] = max(self._promised.get(router, now), now + self.promise_seconds)
            self._look_at = now
        if self._unaware or not self._was_member:
            return peer_pb2.PromiseResponse(knows_caller=True)
        own = self._own
        return peer_pb2.PromiseResponse(
            routers=sorted(own.routers),
            joining=sorted(own.joining),
            joins_seconds=max(0.0, own.joins[0] - now) if own.joining else 0.0,
            seconds=self.promise_seconds,
            age_seconds=min(1e9, now - own.changes[-1][0]),
            changes=own.number,
            knows_caller=True,
        )

    def take(self, router: str, promise: peer_pb2.PromiseResponse, asked_at: float) -> None:
        """Takes the promise of another router, which was asked for at a time."""
        if router not in self._members:
            return
        # An earlier answer may mean a record that was lost since.
        if promise.knows_caller and asked_at >= self._member_since:
            self._set_unaware(self._unaware - {router})
        if not promise.seconds:
            return
        now, view = self._clock(), self._views.setdefault(router, _View())
        before = view.number, view.joining, view.until > now
        view.change(now - promise.age_seconds, frozenset(promise.routers), promise.changes)
        view.joining = frozenset(promise.joining)
        if not self._known.issuperset(view.routers | view.joining):
            self._know()
        view.joins = asked_at + promise.joins_seconds, now + promise.joins_seconds
        view.until = asked_at + promise.seconds
        if before != (view.number, view.joining, True):
            self._tell_change()

    # Lenders.

    def lenders(self, key: str) -> tuple[str, ...]:
        """The routers that may lend, the likeliest first."""
        self._refresh(self._clock())
        alive = self._choose(key, self._own.routers)
        first = self._choose(key, frozenset(self._members))
        return (alive,) if alive == first or not first else (alive, first) if alive else (first,)

    def lends_since(self, key: str) -> float | None:
        """The time since which this router has been the only one to lend; None if it does not lend now."""
        now = self._clock()
        self._refresh(now)
        lends = self._lends.get(key)
        if lends is None or now >= lends[1]:
            lends = self._find(key, now)
            if lends is None:
                return None
            if len(self._lends) >= _MOST_KEYS:
                self._lends.clear()
            self._lends[key] = lends
        return lends[0]

    def _find(self, key: str, now: float) -> tuple[float, float] | None:
        if not self.may_lend:
            return None
        if len(self._members) == 2 and self._choose(key, frozenset(self._members)) == self._own_id:
            own = self._supports(self._own, key, now)
            if own is not None and self.is_registered():
                # The other one lends only after this one's record is gone.
                return own[0], now
        needed = len(self._members) // 2 + 1
        views = (self._views[name] for name in self._members if name in self._views)
        views = (view for view in views if view.joining or self._is_chosen(key, view.routers))
        found = [support for view in views if (support := self._supports(view, key, now)) is not None]
        if len(found) < needed:
            return None
        since = sorted(since for since, _ in found)[needed - 1]
        return since, sorted((until for _, until in found), reverse=True)[needed - 1]

    def _supports(self, view: _View, key: str, now: float) -> tuple[float, float] | None:
        """The times from and until which a router supports this one, if it does."""
        is_chosen = partial(self._is_chosen, key)
        until, since, (joins, surely_joined) = view.until, math.inf, view.joins
        changes: list[tuple[float, frozenset[str]]] = list(view.changes)
        if view.joining:
            changes.append((surely_joined, view.routers | view.joining))
            if is_chosen(view.routers) and not is_chosen(changes[-1][1]):
                until = min(until, joins)
                changes.pop()
        for began, routers in reversed(changes):
            if not is_chosen(routers):
                break
            since = began
        return (since, until) if since <= now < until else None

    def _is_chosen(self, key: str, routers: frozenset[str]) -> bool:
        return self._choose(key, routers) == self._own_id

    def _choose(self, key: str, routers: frozenset[str]) -> str:
        """The router with the highest hash; empty of none."""
        for name in self._ranks.get(key) or self._rank(key):
            if name in routers:
                return name
        return ""

    def _rank(self, key: str) -> tuple[str, ...]:
        if len(self._ranks) >= min(_MOST_KEYS, _MOST_RANKED // len(self._known)):
            self._ranks.clear()
        rank = self._ranks[key] = tuple(sorted(self._known, key=partial(score, key), reverse=True))
        return rank

    def _know(self) -> None:
        views = (view.joining.union(*(routers for _, routers in view.changes)) for view in self._views.values())
        self._known = frozenset((self._own_id, *self._members)).union(*views)
        self._ranks.clear()

    # This router's own view.

    def _refresh(self, now: float) -> None:
        """Ends promises that are over, and lets routers join."""
        if now < self._look_at:
            return
        own = self._own
        if own.joining and now >= own.joins[0]:
            self._change(own.joins[0], own.routers | own.joining)
            own.joining, own.joins = frozenset(), (math.inf, math.inf)
        alive = frozenset(name for name in own.routers if self._is_alive(name, now))
        if alive != own.routers:
            log.info("routers of the quorum left", left=sorted(own.routers - alive))
            self._change(now, alive)
        fresh = frozenset(name for name in self._members if self._is_alive(name, now)) - own.routers
        if fresh and not own.joining:
            # Until then, promises that were made without them are over.
            others = (until for name, until in self._promised.items() if name != self._own_id)
            at = max((now + self.promise_seconds, *others))
            own.joining, own.joins = fresh, (at, at)
            self._changed()
        for name in self._promised.keys() - {*own.routers, *self._members}:
            del self._promised[name]
        own.until = math.inf
        self._look_at = min((own.joins[0], *(self._promised[name] for name in own.routers)))

    def _is_alive(self, name: str, now: float) -> bool:
        is_known = name != self._own_id or self._is_member or not self._was_member
        return is_known and now <= self._promised.get(name, -math.inf)

    def _set_unaware(self, unaware: set[str]) -> None:
        if self._unaware and not unaware:
            # What the others did before they knew this router is unknown.
            self._own.change(self._clock(), self._own.routers, self._own.number + 2)
            self._tell_change()
        self._unaware = unaware

    def _change(self, since: float, routers: frozenset[str]) -> None:
        self._own.change(since, routers, self._own.number + 1)
        self._changed()

    def _changed(self) -> None:
        self._lends.clear()
        self._look_at = -math.inf
        self._tell_change()

    def _tell_change(self) -> None:
        self.next_change.set()
        self.next_change = asyncio.Event()


def score(key: str, router: str) -> bytes:
    """The rank of a router for a key."""
    return hashlib.blake2b(f"{router}\n{key}".encode(), digest_size=8).digest()
