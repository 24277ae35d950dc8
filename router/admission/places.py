"""Places for running requests, which all routers of a fleet share: each model's home lends them.

A router keeps the places that its requests use, and gives back those that it does not need. While others wait, one
whose waiting tenants got more work than theirs gives up places as its requests end. With each ask go the counters of
fair_queue.py, so that a tenant's work at one router counts at all.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from baton.engine.v1 import peer_pb2
from baton.errors import BatonError
from router.admission.ledger import THIS_ROUTER
from router.admission.peers import Peers
from router.admission.queue import AdmissionQueue
from router.routing.latency import Clock
from runtime.clock import monotonic

IDLE_SECONDS, BUSY_SECONDS, CONTENDED_SECONDS = 1.0, 0.2, 0.05  # between two asks
_SETTLING_SECONDS = 1.5  # for which a new home lends no more than is told, unless all routers have told
_RECENT_SECONDS = 3.0  # for which a router's wish counts
_UNREACHABLE_SECONDS = 1.0  # then a router has its part of the places, or all of them while it sees no other
_SPARE_PART = 4  # of a router's even part, which it keeps beyond what it needs while no other router waits
_YIELDED_PART = 8  # of a router's places, in one ask
_MOST_TENANTS = 1024  # of whom an ask tells
_MOST_COUNTERS = 10_000  # tenants whose work the home of a model knows
_TELLING_STEPS = 0.5  # of a request's work, below which counters count as equal
_MOST_MODELS = 256  # whose places are remembered as their home


@dataclass(slots=True)
class _Holder:
    """A router as the home knows it."""

    places: int = 0
    is_short: bool = False
    step: float = 0.0
    heard_at: float = 0.0
    waiting: dict[str, int] = field(default_factory=dict)  # requests by tenant


class PlaceLender:
    """The places of one model, at their home, and the tenants' counters. Never lends more than `limit` together."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._holders: dict[str, _Holder] = {}
        self._counters: OrderedDict[str, float] = OrderedDict()  # least recently served first
        self._began = -math.inf

    def begin(self, since: float) -> None:
        """Forgets everything, as this router has become the home at that time."""
        if since > self._began:
            self._holders.clear()
            self._counters.clear()
            self._began = since

    def hold_here(self, places: int) -> None:
        """Notes the places that the home itself has."""
        self._holders.setdefault(THIS_ROUTER, _Holder()).places = places

    def lend(self, borrower: str, ask: peer_pb2.PlacesAsk, limit: int, routers: frozenset[str]) -> peer_pb2.PlacesLoan:
        """Answers the ask of a router. Places of those that are no longer registered are free."""
        now = self._clock()
        self._holders = {name: one for name, one in self._holders.items() if name in routers or name == borrower}
        holder = self._holders.setdefault(borrower, _Holder())
        held, wanted = max(ask.held, ask.running), ask.running + ask.waiting
        others = [one for one in self._holders.values() if one is not holder]
        holder.step, holder.heard_at, holder.is_short = ask.step, now, wanted > held
        self._count(holder, ask, [one for one in others if now < one.heard_at + _RECENT_SECONDS])
        rivals = [one for one in others if one.is_short and now < one.heard_at + _RECENT_SECONDS]
        free = limit - held - sum(one.places for one in others)
        surplus = max((self._surplus(holder, held, one) for one in rivals), default=0)
        # Without tenants to compare, one more than a rival has is for that one to take.
        may_grow = not surplus and (bool(holder.waiting) or all(held <= one.places for one in rivals))
        if not rivals and wanted:
            # So that its next requests need not wait for an answer.
            wanted += max(1, limit // (_SPARE_PART * len(routers)))
        places = min(held, wanted)
        # `routers` has this one by two names.
        is_settled = now >= self._began + _SETTLING_SECONDS or len(self._holders) >= len(routers) - 1
        if wanted > held and free > 0 and may_grow and is_settled:
            places = held + min(wanted - held, -(-free // (1 + len(rivals))))
        elif free <= 0:
            places = max(0, min(places, held - surplus, held + free))
        # What is given up is free once it was told that no request runs there.
        holder.places = max(places, ask.running)
        counters = {name: self._counters[name] for name in holder.waiting}
        return peer_pb2.PlacesLoan(places=places, counters=counters, contended=bool(rivals))

    def _count(self, holder: _Holder, ask: peer_pb2.PlacesAsk, others: Sequence[_Holder]) -> None:
        """Counts what tenants got, and lifts those that have begun to wait, as fair_queue.py does."""
        counters, waited = self._counters, {name for one in (holder, *others) for name in one.waiting}
        # In the order of their names: a message's map has one that differs from process to process.
        for name, work in sorted(ask.served.items()):
            counters[name] = counters.get(name, 0.0) + work
            counters.move_to_end(name)
        least = min((counters[name] for name in waited if name in counters), default=0.0)
        holder.waiting = dict(sorted(ask.waiting_tenants.items()))
        # As in one queue, whose floor is the counter at which the last request began.
        least = max(0.0, least - max(one.step for one in (holder, *others)))
        for name in holder.waiting:
            counters[name] = counters.get(name, least) if name in waited else max(least, counters.get(name, least))
        if len(counters) > _MOST_COUNTERS:
            waits = waited | set(holder.waiting)
            for name in [name for name in islice(counters, len(counters) - _MOST_COUNTERS) if name not in waits]:
                del counters[name]

    def _surplus(self, holder: _Holder, held: int, other: _Holder) -> int:
        """The number of places that a router gives up: for requests whose tenants got less, else half of what it has
        more.
        """
        if not holder.is_short:
            return 0
        if holder.waiting and other.waiting:
            step = _TELLING_STEPS * max(holder.step, other.step)
            least = min(self._counters[name] for name in holder.waiting)
            lagging = sum(count for name, count in other.waiting.items() if self._counters[name] < least - step)
            if lagging:
                return min(lagging, max(1, held // _YIELDED_PART))
            if least < min(self._counters[name] for name in other.waiting) - step:
                return 0
        return max(0, held - other.places) // 2


class SharedPlaces:
    """The places of one model as this router has borrowed them: Places of its queue."""

    def __init__(self, peers: Peers, key: str, wake: Callable[[], None], clock: Clock = monotonic) -> None:
        self._peers = peers
        self._key = key
        self._wake = wake
        self._clock = clock
        self._held = 0
        self._usable = 0
        self._answered_at = clock()
        self._ask_at = 0.0

    def usable(self, limit: int) -> int:
        """Those that are lent; all without other routers, and none for a moment while those are unknown."""
        if self._peers.count == 1:
            if not self._peers.knows_others and self._clock() - self._answered_at <= _UNREACHABLE_SECONDS:
                return min(limit, self._usable)
            self._held = self._usable = limit
            return limit
        if self._clock() - self._answered_at > _UNREACHABLE_SECONDS:
            return min(limit, max(self._usable, limit // self._peers.count, 1))
        return min(limit, self._usable)

    def changed(self) -> None:
        """Has the home asked soon."""
        if self._peers.count > 1:
            self._ask_at = 0.0
            self._wake()

    @property
    def held(self) -> int:
        """Places that the home counts as this router's."""
        return self._held if self._peers.count > 1 else 0

    def is_due(self, now: float) -> bool:
        """True if it is time to ask the home."""
        return self._peers.count > 1 and now >= self._ask_at

    @property
    def due_at(self) -> float:
        """The time of the next question to the home."""
        return self._ask_at if self._peers.count > 1 else math.inf

    async def ask(self, queue: AdmissionQueue, model: str, role: str, lend_here: "LendHere") -> None:
        """Gives back what is not needed and asks for what is, once."""
        order, running = queue.order, queue.running
        limit, home = queue.limit, self._peers.home(self._key)
        if not limit:
            self._ask_at = self._clock() + BUSY_SECONDS
            return
        order.is_shared = order.compares_routers
        served = order.take_unsent(_MOST_TENANTS)
        ask = peer_pb2.PlacesAsk(
            model=model,
            role=role,
            held=min(max(self._held, running), limit),
            running=running,
            waiting=order.count,
            served=served,
        )
        if order.compares_routers:
            ask.step = order.step
            ask.waiting_tenants.update({one.name: one.count for one in islice(order.waiting(), _MOST_TENANTS)})
        # What is given back must not be used meanwhile.
        self._usable = min(self._usable, running)
        loan = None
        try:
            loan = lend_here(ask) if home == THIS_ROUTER else await self._peers.lend_places(home, ask)
        except BatonError:
            loan = None
        finally:
            if loan is None or loan.not_home:
                # The home may have lent fewer than were held.
                self._held = self._usable = min(ask.held, max(running, queue.running))
                self._ask_at = self._clock() + BUSY_SECONDS
        if loan is None or loan.not_home:
            # Its part of the places may be free by now: nothing else may wake what waits for them.
            queue.update()
            return
        self._take(queue, loan)

    def _take(self, queue: AdmissionQueue, loan: peer_pb2.PlacesLoan) -> None:
        self._held = self._usable = loan.places
        now = self._answered_at = self._clock()
        order = queue.order
        for name, counter in sorted(loan.counters.items()):
            order.set_counter(name, counter)
        busy = CONTENDED_SECONDS if loan.contended or order.count else BUSY_SECONDS
        self._ask_at = now + (busy if queue.running or order.count else IDLE_SECONDS)
        queue.update()


LendHere = Callable[[peer_pb2.PlacesAsk], peer_pb2.PlacesLoan]


class PlaceLenders:
    """The places of the models whose home is this router."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._lenders: dict[str, PlaceLender] = {}

    def of(self, key: str, home_since: float) -> PlaceLender:
        """Those of a model and role, by `key_of`."""
        lender = self._lenders.get(key)
        if lender is None:
            if len(self._lenders) >= _MOST_MODELS:
                self._lenders.pop(next(iter(self._lenders)))
            lender = self._lenders[key] = PlaceLender(self._clock)
        lender.begin(home_since)
        return lender


def key_of(model: str, role: str) -> str:
    """The name that the home of a model's places is chosen by. No tenant has such a name."""
    return f"\n{role}\n{model}"
