"""The tenants of a queue, their waiting requests, and the order by their counters."""

import asyncio
import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

_FIRST_ANSWER_TOKENS = 200.0  # of a tenant without measurements


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant's account in one queue. `counter` is its weighted work; `lane` is where it waits."""

    name: str
    lane: "Lane"
    counter: float = 0.0
    running: int = 0
    count: int = 0  # that wait
    work: float = 0.0  # of those
    entry: int = -1  # the number of its valid entry in the heap
    answer_tokens: float = _FIRST_ANSWER_TOKENS
    answers: int = 0  # that have ended
    uncached_share: float = 1.0
    drift: float = 0.0  # by how much the counter is above what was served and what runs
    waiting: dict[int, "OrderedDict[int, Ticket]"] = field(default_factory=dict)  # by priority, in order of arrival
    served: deque[list[float]] = field(default_factory=deque)  # work by slices of the last minute

    @property
    def first(self) -> "Ticket":
        """Its next request: of its highest priority, the oldest."""
        return next(iter(self.waiting[max(self.waiting)].values()))

    @property
    def last(self) -> "Ticket":
        """Its request that it would be served last."""
        return next(reversed(self.waiting[min(self.waiting)].values()))


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in the queue. `work` is estimated until it ends."""

    tenant: Tenant
    priority: int
    weight: float
    work: float
    prompt_tokens: int
    generates: bool = True
    prompt_work: float = 0.0  # the part of `work` that its prompt is
    number: int = -1
    since: float = 0.0
    granted: "asyncio.Future[None] | None" = None


class Lane:
    """Tenants that are served by their counters alone."""

    __slots__ = ("active", "floor", "heap", "lengths", "longest", "work")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Tenant]] = []  # an entry is valid if its number is its tenant's
        self.floor = 0.0  # the counter of the tenant that was served last
        self.active = 0  # tenants that wait
        self.work = 0.0  # of all that waits
        self.lengths: dict[int, dict[Tenant, None]] = {}  # tenants by how many of their requests wait
        self.longest = 0

    @property
    def least(self) -> Tenant | None:
        """The tenant to be served next."""
        heap = self.heap
        while heap and heap[0][1] != heap[0][2].entry:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def resize(self, tenant: Tenant, change: int) -> None:
        """Notes that one more or one less request of a tenant waits."""
        old, new = tenant.count, tenant.count + change
        if old:
            del self.lengths[old][tenant]
        if new:
            self.lengths.setdefault(new, {})[tenant] = None
        tenant.count = new
        self.longest = max(self.longest, new)
        while self.longest and not self.lengths.get(self.longest):
            self.lengths.pop(self.longest, None)
            self.longest -= 1

    def enter(self, tenant: Tenant, number: int) -> None:
        """Puts a tenant into the order by its present counter; `number` is no earlier entry's."""
        if len(self.heap) > 2 * self.active + 64:
            self.heap[:] = [entry for entry in self.heap if entry[1] == entry[2].entry]
            heapq.heapify(self.heap)
        tenant.entry = number
        heapq.heappush(self.heap, (tenant.counter, number, tenant))

    @property
    def longest_tenant(self) -> Tenant:
        """The tenant with the most waiting requests; the latest of several."""
        return next(reversed(self.lengths[self.longest]))
