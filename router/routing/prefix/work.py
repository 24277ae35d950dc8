"""The prompts that this router has sent to each rank of a worker: the queue now, and the share of the work so far."""

import math
from collections import OrderedDict
from dataclasses import dataclass

from router.routing.latency import Clock
from router.routing.prefix.prefix_caches import Cache
from runtime.clock import monotonic

# Prompts were computed together if the next one is ready within this share of the seconds that each took, or within so
# many seconds: engines compute several in one step.
_TOGETHER_SHARE = 0.1
_TOGETHER_SECONDS = 0.001


@dataclass(slots=True, eq=False)
class WorkTicket:
    """A prompt in a worker's queue, and the predicted time to compute it."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Computed:
    """Prompts that a rank has computed together: how many, their tokens, and the seconds that all of them took.

    `looks_back` is the sum of what each token looked back on, and `loading` are the seconds that were to be loaded.
    """

    prompts: int
    tokens: int
    seconds: float
    looks_back: float = 0.0
    loading: float = 0.0

    def is_with(self, later: "Computed") -> bool:
        """True if what was ready next was computed with these."""
        return later.seconds <= max(_TOGETHER_SECONDS, _TOGETHER_SHARE * self.seconds / self.prompts)

    def __add__(self, later: "Computed") -> "Computed":
        return Computed(
            self.prompts + later.prompts,
            self.tokens + later.tokens,
            self.seconds + later.seconds,
            self.looks_back + later.looks_back,
            self.loading + later.loading,
        )


_NOTHING = Computed(0, 0, 0.0)


class PromptQueue:
    """The prompts that this router has sent to a rank and that are not computed yet, first come, first served."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._tickets: OrderedDict[int, WorkTicket] = OrderedDict()
        # What `wait_at` reads, kept as prompts come and go, since each request asks all queues.
        self.seconds = 0.0  # of all prompts
        self.head_seconds = 0.0  # of the first one
        self.head_since = 0.0  # when that began
        self._has_head_begun = True  # whether it is known that it began then
        self._beside = _NOTHING  # computed before the first one, since that began
        self._together: Computed | None = None  # the last ones, which more may belong to

    @property
    def wait_seconds(self) -> float:
        """The seconds that a prompt sent now will wait."""
        return self.wait_at(self._clock())

    def wait_at(self, now: float) -> float:
        """The seconds that a prompt sent at `now` will wait."""
        # If the first one takes longer than predicted, that says nothing about those behind it.
        return self.seconds - min(self.head_seconds, now - self.head_since)

    def add(self, seconds: float) -> WorkTicket:
        """Adds a prompt that is predicted to take so long."""
        if not self._tickets:
            self.head_since, self.head_seconds, self._has_head_begun = self._clock(), seconds, True
        ticket = WorkTicket(seconds)
        self._tickets[id(ticket)] = ticket
        self.seconds += seconds
        return ticket

    def done(self, ticket: WorkTicket, tokens: int, context: float = 0.0, loading: float = 0.0) -> list[Computed]:
        """Removes a prompt that is computed, of tokens that looked back on so many on average, after so many seconds of
        loading. Returns what is known by now of those that were computed together, which may be earlier ones.

        Nothing of a prompt that followed one that was given up: how much of it was computed before that is not known.
        """
        has_begun, is_known = self._has_head_begun, self._tickets.get(id(ticket)) is ticket
        since = self._remove(ticket)
        if since is None:
            if is_known:
                self._beside += Computed(1, tokens, 0.0, tokens * context, loading)
            return []
        latest = self._beside + Computed(1, tokens, self.head_since - since, tokens * context, loading)
        self._beside, self._has_head_begun = _NOTHING, True
        found = self._grouped(latest if has_begun else None)
        if not self._tickets and self._together is not None:
            found.append(self._together)
            self._together = None
        return found

    def _grouped(self, latest: Computed | None) -> list[Computed]:
        """Adds the latest to the last ones, or returns those and keeps the latest instead."""
        before = self._together
        if before is not None and latest is not None and before.is_with(latest):
            self._together = before + latest
            return []
        self._together = latest
        return [before] if before is not None else []

    def give_up(self, ticket: WorkTicket) -> None:
        """Removes a prompt that will not be computed."""
        if self._remove(ticket) is not None:
            self._has_head_begun = False
            self._beside = _NOTHING

    def _remove(self, ticket: WorkTicket) -> float | None:
        """Returns when it began if it was the first one."""
        if self._tickets.get(id(ticket)) is not ticket:
            return None
        is_head = next(iter(self._tickets.values())) is ticket
        del self._tickets[id(ticket)]
        self.seconds = max(0.0, self.seconds - ticket.seconds) if self._tickets else 0.0
        if not is_head:
            return None
        self.head_seconds = next(iter(self._tickets.values())).seconds if self._tickets else 0.0
        since, self.head_since = self.head_since, self._clock()
        return since


class ArrivalRate:
    """The requests a second that this router places, over about the last half minute."""

    _HORIZON_SECONDS = 30.0

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._count = 0.0
        self._at = clock()

    @property
    def per_second(self) -> float:
        """The rate; too low during the first half minute."""
        return self._count * math.exp((self._at - self._clock()) / self._HORIZON_SECONDS) / self._HORIZON_SECONDS

    def count(self) -> None:
        """Counts a request."""
        now = self._clock()
        self._count = self._count * math.exp((self._at - now) / self._HORIZON_SECONDS) + 1.0
        self._at = now


class RankWork:
    """The work of the rank with this cache.

    `given_tokens`, of the prompts to compute, and `given_streams`, to decode, may be compared with those of other
    ranks, and have no other meaning. Tokens, not seconds: what a prompt was predicted to take while nothing was
    measured yet would count against a rank for a long time.
    """

    __slots__ = ("cache", "given_streams", "given_tokens", "queue")

    def __init__(self, cache: Cache, given_tokens: float, given_streams: float, clock: Clock) -> None:
        self.cache = cache
        self.queue = PromptQueue(clock)
        self.given_tokens = given_tokens
        self.given_streams = given_streams


class WorkShares:
    """Counts the work that each rank was given. The work of each prompt counts a little more than of the one before.

    So the shares of all ranks stay comparable, and follow what has changed.
    """

    # After 1,400 prompts, on whichever ranks, a prompt counts twice as much.
    _GROWTH = 1.0005
    # From this weight on, all work is scaled down: far below the largest float.
    _MOST_WEIGHT = 1e100

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._weight = 1.0  # of the next prompt
        self._ranks: dict[RankWork, None] = {}

    def rank(self, cache: Cache) -> RankWork:
        """The work of a new rank. It begins with the mean, so that it does not have to catch up."""
        count = max(1, len(self._ranks))
        tokens, streams = (
            sum(each.given_tokens for each in self._ranks),
            sum(each.given_streams for each in self._ranks),
        )
        found = RankWork(cache, tokens / count, streams / count, self._clock)
        self._ranks[found] = None
        return found

    def forget(self, rank: RankWork) -> None:
        """Forgets a rank whose worker has left."""
        self._ranks.pop(rank, None)

    def give(self, rank: RankWork, decoding: RankWork, tokens: int, seconds: float) -> WorkTicket:
        """Adds a prompt of so many tokens to compute, predicted to take so long, and the rank that decodes after it."""
        rank.given_tokens += tokens * self._weight
        decoding.given_streams += self._weight
        self._weight *= self._GROWTH
        if self._weight > self._MOST_WEIGHT:
            for each in self._ranks:
                each.given_tokens /= self._weight
                each.given_streams /= self._weight
            self._weight = 1.0
        return rank.queue.add(seconds)
