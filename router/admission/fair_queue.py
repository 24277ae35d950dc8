"""The order of waiting requests: fair to tenants by the work they ask for, or by priority alone.

Virtual token counters ("Fairness in Serving Large Language Models", OSDI 2024): each tenant has a counter of the work
it got, and the one with the least is next. Two backlogged tenants differ by at most twice the larger of the largest
prompt and all places' largest answers. A tenant that comes back cannot save up: it is lifted to the counter at which
the last request began (as in start-time fair queueing, SIGCOMM 1996), so that it is next, whatever is corrected
meanwhile. An answer's work is estimated when its request begins and corrected when it ends.
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping

from router.admission.lanes import Lane, Tenant, Ticket
from router.config import Fairness
from router.qos import OTHERS
from router.routing.latency import Clock
from runtime.clock import monotonic

TOKEN_WORK = 4.0  # of one generated token, in tokens of a prompt
# Beyond this number idle tenants are forgotten, and new ones share one account if none is idle: anyone invents names.
_MOST_TENANTS = 10_000
_LOOKED_AT = 4  # how many are examined for each new tenant, which bounds the cost of one request
_LEARNT = 0.1  # the weight of a new measurement
_PRIORITIES_PER_DOUBLING = 5  # of the weight
_MINUTE, _SLICE = 60.0, 10.0  # what counts as recent, and the steps in which it passes
# A tenant starves that has waited for so long, and got less than this part of an even share.
_LONG_SECONDS, _LITTLE = 10.0, 0.5


class FairQueue:
    """The waiting requests and the tenants' counters. Every operation takes the same time for any number of tenants.

    `weighted`: one lane, in which a request's work counts less by its priority. `strict`: a lane for each priority, the
    highest first. `none`: all requests are one tenant's, by priority and then in order of arrival.
    """

    def __init__(self, fairness: Fairness = "none", clock: Clock = monotonic) -> None:
        self.tells_tenants = fairness != "none"
        self._is_strict = fairness == "strict"
        self._clock = clock
        self._lanes: dict[int, Lane] = {0: Lane()}  # by priority if strict
        self._tenants: OrderedDict[tuple[int, str], Tenant] = OrderedDict()  # least recently seen first
        self._numbers = itertools.count()
        self.count = 0  # of waiting requests
        self._served: deque[list[float]] = deque()  # as a tenant's, of all
        self.is_shared = False  # with other routers
        self._unsent: dict[str, float] = {}  # what other routers have not heard of
        self._single = self._tenant("", 0)

    def ticket(self, name: str, priority: int, prompt_tokens: int, *, generates: bool = True) -> Ticket:
        """A request of a tenant, which `generates` an answer or only computes its prompt."""
        if not self.tells_tenants:
            return Ticket(self._single, priority, 1.0, 1.0, prompt_tokens)
        tenant = self._tenant(name, priority)
        weight = 1.0 if self._is_strict else 2.0 ** (priority / _PRIORITIES_PER_DOUBLING)
        ticket = Ticket(tenant, priority, weight, 1.0, prompt_tokens, generates)
        _estimate(ticket)
        return ticket

    # Waiting.

    def push(self, ticket: Ticket) -> None:
        """Adds a waiting request."""
        tenant, lane = ticket.tenant, ticket.tenant.lane
        ticket.number, ticket.since = next(self._numbers), self._clock()
        tenant.waiting.setdefault(ticket.priority, OrderedDict())[ticket.number] = ticket
        if not tenant.count:
            self._lift(tenant)
            lane.active += 1
            lane.resize(tenant, 1)
            self._enter(tenant)
        else:
            lane.resize(tenant, 1)
        tenant.work += ticket.work
        lane.work += ticket.work
        self.count += 1

    def pop(self) -> Ticket:
        """Removes the next request, and counts its work for its tenant."""
        lane = next(lane for _, lane in sorted(self._lanes.items(), reverse=True) if lane.active)
        tenant = lane.least
        assert tenant is not None
        ticket = tenant.first
        lane.floor = max(lane.floor, tenant.counter)
        self.discard(ticket)
        self._begin(ticket)
        return ticket

    def discard(self, ticket: Ticket) -> bool:
        """Removes a waiting request. Returns whether it was there."""
        tenant, lane = ticket.tenant, ticket.tenant.lane
        same = tenant.waiting.get(ticket.priority)
        if same is None or same.pop(ticket.number, None) is None:
            return False
        if not same:
            del tenant.waiting[ticket.priority]
        lane.resize(tenant, -1)
        tenant.work = tenant.work - ticket.work if tenant.count else 0.0
        if not tenant.count:
            tenant.entry = -1
            lane.active -= 1
        lane.work = lane.work - ticket.work if lane.active else 0.0
        self.count -= 1
        return True

    def clear(self) -> list[Ticket]:
        """Removes all that wait."""
        removed = [ticket for tenant in self.waiting() for same in tenant.waiting.values() for ticket in same.values()]
        for ticket in removed:
            self.discard(ticket)
        return removed

    def to_evict(self, ticket: Ticket) -> Ticket:
        """The request to refuse so that `ticket` can wait: itself if its own tenant has the longest queue.

        Else the last one of the tenant with the most, so that a flood fills no other tenant's queue.
        """
        lane = next((lane for _, lane in sorted(self._lanes.items()) if lane.active), ticket.tenant.lane)
        if not lane.active:
            return ticket
        longest = lane.longest_tenant
        if self._is_strict and longest.last.priority != ticket.priority:
            return longest.last if longest.last.priority < ticket.priority else ticket
        if longest.count > ticket.tenant.count:
            return longest.last
        own = ticket.tenant.last if ticket.tenant.count else ticket
        return own if own.priority < ticket.priority else ticket

    def work_ahead(self, ticket: Ticket) -> float:
        """The work that would be begun before this request, as far as is known."""
        tenant, lane = ticket.tenant, ticket.tenant.lane
        before = sum(len(same) for priority, same in tenant.waiting.items() if priority >= ticket.priority)
        own = before * tenant.work / tenant.count if tenant.count else 0.0
        others, rivals = lane.work - tenant.work, lane.active - bool(tenant.count)
        if rivals and (least := lane.least) is not None:
            needed = max(0.0, tenant.counter - least.counter) + (own + ticket.work) / ticket.weight
            own += min(others, needed * rivals)
        above = sum(lane.work for priority, lane in self._lanes.items() if priority > self._lane_of(ticket.priority))
        return own + above

    # Work.

    def begin(self, ticket: Ticket) -> None:
        """Counts a request that runs without having waited."""
        if self.tells_tenants and not ticket.tenant.count:
            self._lift(ticket.tenant)
            lane = ticket.tenant.lane
            lane.floor = max(lane.floor, ticket.tenant.counter)
        self._begin(ticket)

    def _begin(self, ticket: Ticket) -> None:
        ticket.tenant.running += 1
        if self.tells_tenants:
            _estimate(ticket)  # by what was learnt while it waited
            self._serve(ticket.tenant, ticket.work, ticket.weight)

    def end(self, ticket: Ticket, cached_tokens: int = 0, answer_tokens: int = 0) -> None:
        """Corrects the work of a request that has ended by what it really was."""
        tenant = ticket.tenant
        tenant.running -= 1
        if not self.tells_tenants:
            return
        uncached = max(0, ticket.prompt_tokens - cached_tokens)
        work = uncached - ticket.prompt_work
        if ticket.generates:
            work += self._answer_work(ticket, answer_tokens)
        self._serve(tenant, work, ticket.weight)
        if ticket.prompt_tokens:
            tenant.uncached_share += _LEARNT * (uncached / ticket.prompt_tokens - tenant.uncached_share)

    def _answer_work(self, ticket: Ticket, answer_tokens: int) -> float:
        """The correction of an answer's estimate, and what is learnt from it.

        By the estimate of now, not of its begin: the counter then follows what was served in the last seconds more
        closely (1.15 to 1.19 between two tenants in 10 s at p95, instead of 1.20 to 1.26). In the sum both are the same
        but for what runs; a tenant that spoils its estimates on purpose gains no more than that.
        """
        tenant, begun = ticket.tenant, ticket.work - ticket.prompt_work
        now = TOKEN_WORK * tenant.answer_tokens
        tenant.answers += 1
        tenant.answer_tokens += max(_LEARNT, 1 / tenant.answers) * (answer_tokens - tenant.answer_tokens)
        drift = tenant.drift + begun - now
        most = TOKEN_WORK * tenant.answer_tokens * tenant.running
        tenant.drift = max(-most, min(most, drift))
        return TOKEN_WORK * answer_tokens - now + tenant.drift - drift

    def undo(self, ticket: Ticket) -> None:
        """Takes back what `begin` counted, of a request that used no worker."""
        ticket.tenant.running -= 1
        if self.tells_tenants:
            self._serve(ticket.tenant, -ticket.work, ticket.weight)

    def _serve(self, tenant: Tenant, work: float, weight: float) -> None:
        self._add(tenant, work / weight)
        if self.is_shared and (tenant.name in self._unsent or len(self._unsent) < _MOST_TENANTS):
            self._unsent[tenant.name] = self._unsent.get(tenant.name, 0.0) + work / weight
        now = self._clock()
        _note(tenant.served, now, work)
        _note(self._served, now, work)

    def _add(self, tenant: Tenant, work: float) -> None:
        tenant.counter += work
        if tenant.count:
            self._enter(tenant)

    # Between routers.

    @property
    def compares_routers(self) -> bool:
        """True if its counters mean the same at every router."""
        return self.tells_tenants and not self._is_strict

    @property
    def step(self) -> float:
        """The work that a waiting request adds to a counter, on average."""
        return self._lanes[0].work / max(1, self.count)

    def take_unsent(self, most: int) -> Mapping[str, float]:
        """The work of each tenant that other routers are to be told of; of too many, the most."""
        unsent, self._unsent = self._unsent, {}
        if len(unsent) <= most:
            return unsent
        return dict(heapq.nlargest(most, unsent.items(), key=lambda item: abs(item[1])))

    def set_counter(self, name: str, counter: float) -> None:
        """Takes over a counter that counts what a tenant got at all routers, but for what they have not heard of."""
        tenant = self._tenants.get((0, name))
        if tenant is not None and self.compares_routers:
            self._add(tenant, counter + self._unsent.get(name, 0.0) - tenant.counter)

    # Tenants.

    @property
    def tenants(self) -> Iterable[Tenant]:
        """All that are remembered."""
        return self._tenants.values()

    def recent_work(self, tenant: Tenant) -> float:
        """The work that a tenant was served in the last minute."""
        return self._recent(tenant.served)

    def starving(self) -> int:
        """The number of tenants that have waited for long, and got little of what the tenants in this queue got."""
        active = max(1, sum(lane.active for lane in self._lanes.values()))
        little = _LITTLE * self._recent(self._served) / active
        return sum(
            1
            for tenant in self.waiting()
            if self.longest_wait(tenant) > _LONG_SECONDS and self.recent_work(tenant) < little
        )

    def longest_wait(self, tenant: Tenant) -> float:
        """For how long a tenant's next request has waited."""
        return self._clock() - tenant.first.since if tenant.count else 0.0

    def waiting(self) -> Iterator[Tenant]:
        """The tenants that wait."""
        for lane in self._lanes.values():
            for tenants in lane.lengths.values():
                yield from tenants

    def _recent(self, served: Iterable[list[float]]) -> float:
        oldest = self._clock() - _MINUTE
        return sum(work for began, work in served if began >= oldest)

    def _lane_of(self, priority: int) -> int:
        return priority if self._is_strict else 0

    def _lift(self, tenant: Tenant) -> None:
        lane = tenant.lane
        least = lane.least
        floor = lane.floor if least is None else min(lane.floor, least.counter)
        tenant.counter = max(tenant.counter, floor)

    def _enter(self, tenant: Tenant) -> None:
        tenant.lane.enter(tenant, next(self._numbers))

    def _tenant(self, name: str, priority: int) -> Tenant:
        lane = self._lane_of(priority)
        tenant = self._tenants.get((lane, name))
        if tenant is None:
            tenant = self._remember(lane, name)
        self._tenants.move_to_end((lane, tenant.name))
        return tenant

    def _remember(self, lane: int, name: str) -> Tenant:
        for _ in range(_LOOKED_AT):
            if len(self._tenants) < _MOST_TENANTS:
                break
            key, oldest = next(iter(self._tenants.items()))
            if oldest.running or oldest.count:
                self._tenants.move_to_end(key)
            else:
                del self._tenants[key]
        else:
            name = OTHERS
        at = self._lanes.setdefault(lane, Lane())
        tenant = self._tenants.get((lane, name))
        if tenant is None:
            tenant = self._tenants[lane, name] = Tenant(name, at, counter=at.floor)
        return tenant


def _note(served: deque[list[float]], now: float, work: float) -> None:
    if not served or now >= served[-1][0] + _SLICE:
        while served and served[0][0] < now - _MINUTE:
            served.popleft()
        served.append([now, 0.0])
    served[-1][1] += work


def _estimate(ticket: Ticket) -> None:
    ticket.prompt_work = max(1.0, ticket.prompt_tokens * ticket.tenant.uncached_share)
    ticket.work = ticket.prompt_work + (TOKEN_WORK * ticket.tenant.answer_tokens if ticket.generates else 0.0)
