"""The registered routers of a namespace, and which of them is the home of a key."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial

import structlog

from baton.engine.v1 import peer_pb2
from baton.errors import Unavailable
from discovery.registry import Registry, WorkerRecord
from router.admission.ledger import THIS_ROUTER
from router.peers.link import PeerLink
from router.peers.quorum import Quorum, score
from router.routing.latency import Clock
from router.telemetry import metrics
from runtime.clock import monotonic, perf_counter

log = structlog.get_logger(__name__)

# The capability of routers that share neither quotas nor places: they are no home.
RECORDS_ONLY = "records_only"
# That of routers that have quotas: they decide together which of them lends each.
QUOTAS = "quotas"

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MOST_HOMES = 20_000  # that are remembered
_MOST_ROUTERS = 1024  # of more records those that are known, and the first others
_RESTS = 9  # times as long as an update takes
_MOST_VIEWS = 64  # the latest, by which it is known since when this router is a home


Connect = Callable[[WorkerRecord], PeerLink]


class RegisteredPeers:
    """Peers as the registry has them. The home is the router with the highest hash of its id and the key.

    Routers without an address beyond their host share with those of the same host alone.
    """

    def __init__(self, own: WorkerRecord, connect: Connect, clock: Clock = monotonic) -> None:
        self.own = own
        self.quorum = Quorum(own.worker_id, clock)
        self._connect = connect
        self._clock = clock
        self._links: dict[str, PeerLink] = {}
        self._homes: dict[str, str] = {}
        self._since: dict[str, float] = {}
        self._has_view = False
        self.knows_others = False  # by a view that has this router's own record
        # The latest first: since when which routers were registered.
        self._views: deque[tuple[float, tuple[str, ...]]] = deque([(-math.inf, (own.worker_id,))], _MOST_VIEWS)
        self.changed: Callable[[], None] = lambda: None

    @property
    def count(self) -> int:
        """The number of routers that share limits (`Peers.count`)."""
        return len({*self._views[0][1], self.own.worker_id})

    @property
    def routers(self) -> frozenset[str]:
        """The ids of those that share limits, this one's as THIS_ROUTER too."""
        return frozenset((*self._views[0][1], THIS_ROUTER))

    @property
    def links(self) -> Iterable[PeerLink]:
        """To all other routers."""
        return tuple(self._links.values())

    def has(self, router: str) -> bool:
        """True if another router is registered by this id."""
        return router in self._links

    async def follow(self, registry: Registry) -> None:
        """Follows the registry of routers, until cancelled."""
        async with aclosing(registry.watch()) as views:
            async for records in views:
                began = perf_counter()
                self.update(records)
                # Meanwhile the views of a flood of records become one.
                await asyncio.sleep(_RESTS * (perf_counter() - began))

    def update(self, records: Iterable[WorkerRecord]) -> None:
        """Takes a view of the registry."""
        known = {self.own.worker_id, *self._links}
        reached = sorted((one for one in records if self._reaches(one)), key=lambda one: one.worker_id not in known)
        others = {one.worker_id: one for one in reached[:_MOST_ROUTERS]}
        is_registered = others.pop(self.own.worker_id, None) is not None
        homes = {name for name, record in others.items() if RECORDS_ONLY not in record.capabilities}
        # While the others do not know of it, this router is no home: they would choose another one.
        own = {self.own.worker_id} if is_registered or not homes else set()
        self._connect_all(others)
        routers = tuple(sorted(homes | own))
        is_new = is_registered and not self.knows_others
        if is_new and homes:
            # What they did before this router came is unknown.
            self._views.clear()
        is_first = is_new or not self._has_view
        if is_first:
            self._has_view, self.knows_others = True, is_registered
        members = {name for name in homes if QUOTAS in others[name].capabilities}
        self.quorum.set_members(members | {self.own.worker_id} if is_registered else members)
        has_changed = not self._views or routers != self._views[0][1]
        if has_changed:
            self._views.appendleft((self._clock(), routers))
            self._homes.clear()
            self._since.clear()
            log.info("routers of the fleet changed", routers=self.count)
            metrics.PEERS.set(self.count)
        if has_changed or is_first:
            self.changed()

    def _connect_all(self, others: Mapping[str, WorkerRecord]) -> None:
        """Has a link to each of them, and to no other router."""
        for name in [name for name, link in self._links.items() if others.get(name) != link.record]:
            self._links.pop(name).close()
        for name, record in others.items():
            if name not in self._links:
                self._links[name] = self._connect(record)

    def close(self) -> None:
        """Ends all calls."""
        self.update(())

    def home(self, key: str) -> str:
        """The home router of a key (`Peers.home`)."""
        found = self._homes.get(key)
        if found is None:
            if len(self._homes) >= _MOST_HOMES:
                self._homes.clear()
            found = self._homes[key] = self._choose(key, self._views[0][1])
        return found

    def home_since(self, key: str) -> float:
        """The time since which the key has this home (`Peers.home_since`)."""
        since = self._since.get(key)
        if since is None:
            if len(self._since) >= _MOST_HOMES:
                self._since.clear()
            since = self._since[key] = self._find_since(key)
        return since

    def _find_since(self, key: str) -> float:
        since = self._views[0][0]
        for began, routers in self._views:
            if self._choose(key, routers) != THIS_ROUTER:
                break
            since = began
        return since

    def lenders(self, key: str) -> tuple[str, ...]:
        """The routers that may lend a quota, the likeliest first (`Peers.lenders`)."""
        return tuple(self._named(name) for name in self.quorum.lenders(key))

    def lends_since(self, key: str) -> float | None:
        """The time since which this router lends a quota (`Peers.lends_since`)."""
        return self.quorum.lends_since(key)

    def next_change(self) -> asyncio.Event:
        """Set when a router's promises change (`Peers.next_change`)."""
        return self.quorum.next_change

    async def lend(self, home: str, ask: peer_pb2.QuotaAsk) -> peer_pb2.QuotaLoan:
        """Asks the home for a part of a quota (`Peers.lend`)."""
        return await self._link(home).ask_quota(ask)

    async def lend_places(self, home: str, ask: peer_pb2.PlacesAsk) -> peer_pb2.PlacesLoan:
        """Asks the home for places (`Peers.lend_places`)."""
        return await self._link(home).ask_places(ask)

    def _link(self, home: str) -> PeerLink:
        link = self._links.get(home)
        if link is None:
            raise Unavailable(f"router {home} has left")
        return link

    def _choose(self, key: str, routers: tuple[str, ...]) -> str:
        return self._named(max(routers, key=partial(score, key)))

    def _named(self, router: str) -> str:
        return THIS_ROUTER if router == self.own.worker_id else router

    def _reaches(self, other: WorkerRecord) -> bool:
        if _is_local(self.own) or _is_local(other):
            return _is_local(self.own) and _is_local(other) and self.own.location.host == other.location.host
        return True


def _is_local(record: WorkerRecord) -> bool:
    return record.host in _LOOPBACK
