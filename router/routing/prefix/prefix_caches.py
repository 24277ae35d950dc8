"""A router's view of its workers' prefix caches: reported by them, or estimated from what it has sent there."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from router.routing.latency import Clock
from router.routing.prefix.expected_blocks import ExpectedBlocks
from router.routing.prefix.kv_index import KvIndex
from runtime.clock import monotonic

# How long after its answer a prompt counts as cached although the worker has not reported it.
_CONFIRM_SECONDS = 5.0
# How long a prompt counts as cached on a worker that does not report its cache, since it was last sent there.
_REMEMBER_SECONDS = 600.0
# The most blocks that count as cached on such a worker, which takes about 30 MB.
_MOST_ESTIMATED = 1 << 18
# So many prompts in a row of which such a worker had nothing, although it was sent them before: it caches nothing.
_MOST_MISSES = 3
# How often expired blocks are looked for.
_EXPIRY_STEP_SECONDS = 0.5


class Cache(NamedTuple):
    """One prefix cache: of a process, and of one of its data-parallel ranks."""

    process: str
    rank: int = 0


class Below(NamedTuple):
    """The number of a prompt's cached blocks, the last ones, that are below the pool of the device, by tier."""

    host: int = 0
    disk: int = 0


class PrefixCaches:
    """The index of all workers' blocks, in whatever tier, and of those that are below the pool of the device.

    The blocks of a prompt count as cached as soon as the router has sent it. If the worker reports its cache, they do
    beside the index, until it confirms them or should have done so. If it does not, they are in the index for a while,
    and at most as many as it has room for.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._index: KvIndex[Cache] = KvIndex()
        self._below: KvIndex[Cache] = KvIndex()  # on host memory or disk
        self._on_disk: KvIndex[Cache] = KvIndex()
        self._tiered: set[Cache] = set()  # those that have ever told of another tier
        self._clock = clock
        # Of workers that report: what was sent there and is not reported yet.
        self._expected: dict[Cache, ExpectedBlocks] = {}
        # Of the others: the blocks that were sent there, the oldest first, with the time when they expire.
        self._estimated: dict[Cache, dict[int, float]] = {}
        self._reporting: set[str] = set()
        self._misses: dict[str, int] = {}  # of others, in a row
        self._cacheless: set[str] = set()  # of others: estimates of what they have were wrong
        self._expire_at = clock()

    def reports(self, process: str) -> bool:
        """True if a worker reports what it has cached; otherwise that is estimated."""
        return process in self._reporting

    def num_blocks(self, cache: Cache) -> int:
        """The number of blocks that a cache has reported, or is estimated to hold."""
        return self._index.num_blocks(cache)

    def match(self, keys: Sequence[int]) -> dict[Cache, int]:
        """The number of a prompt's first blocks that each cache has; only caches that have any."""
        self._expire()
        matched = self._index.match(keys)
        if self._cacheless:
            matched = {cache: count for cache, count in matched.items() if cache.process not in self._cacheless}
        if keys:
            # The first key that a cache lacks, by how many it has: most caches have equally many.
            total, now, missing = len(keys), self._clock(), {0: keys[0]}
            for cache, expected in self._expected.items():
                if expected.firsts:
                    count = matched.get(cache, 0)
                    key = missing.get(count)
                    if key is None:
                        key = missing[count] = keys[count] if count < total else -1
                    if key in expected.firsts:
                        self._add_expected(matched, cache, expected, keys, now)
        return matched

    def below(self, keys: Sequence[int], matched: Mapping[Cache, int]) -> Mapping[Cache, Below]:
        """The blocks of each cache that must be loaded; only caches of which there are any.

        A prefix leaves a tier with its end first, so its beginning is in the fastest one.
        """
        if not self._tiered:
            return {}
        found = {}
        for cache in self._tiered.intersection(matched):
            count = matched[cache]
            on_device = _first(keys, count, partial(self._below.holds, cache))
            if on_device < count:
                not_on_disk = _first(keys, count, partial(self._on_disk.holds, cache))
                found[cache] = Below(max(0, not_on_disk - on_device), count - max(not_on_disk, on_device))
        return found

    def _add_expected(
        self, matched: dict[Cache, int], cache: Cache, expected: ExpectedBlocks, keys: Sequence[int], now: float
    ) -> None:
        """Corrects the number of blocks that a cache has by the expected ones, and by reported ones after them."""
        first = count = matched.get(cache, 0)
        while (extent := expected.extent(keys, count, now)) > count:
            count = extent
            while count < len(keys) and self._index.holds(cache, keys[count]):
                count += 1
        if count > first:
            matched[cache] = count

    def replace(self, cache: Cache, keys: Sequence[int]) -> None:
        """Notes a report of everything that is in a cache."""
        self._reporting.add(cache.process)
        self._cacheless.discard(cache.process)
        self._index.clear(cache)
        self._below.clear(cache)
        self._on_disk.clear(cache)
        for key in self._estimated.pop(cache, ()):
            # It has not reported before: what was sent there may be on its way.
            self.expect(cache, [key], 0.0)
        self.store(cache, keys)

    def move(self, cache: Cache, keys: Sequence[int], *, on_disk: bool) -> None:
        """Notes a report of blocks that are now below the pool of the device."""
        self._tiered.add(cache)
        self._index.store(cache, keys)
        self._below.store(cache, keys)
        (self._on_disk.store if on_disk else self._on_disk.remove)(cache, keys)

    def store(self, cache: Cache, keys: Sequence[int]) -> None:
        """Notes a report of blocks that are now in the pool of the device."""
        self._index.store(cache, keys)
        if cache in self._tiered:
            self._below.remove(cache, keys)
            self._on_disk.remove(cache, keys)
        expected = self._expected.get(cache)
        if expected:
            expected.reported(keys, partial(self._index.holds, cache))

    def remove(self, cache: Cache, keys: Sequence[int]) -> None:
        """Notes a report of blocks that are gone."""
        self._index.remove(cache, keys)
        if cache in self._tiered:
            self._below.remove(cache, keys)
            self._on_disk.remove(cache, keys)

    def expect(
        self, cache: Cache, keys: Sequence[int], seconds: float, most_blocks: int = 0, *, start: int = 0
    ) -> None:
        """Notes a prompt that was sent to a worker, which will have computed it within `seconds`.

        Its blocks from `start` on were not cached there. `most_blocks` is the size of the cache, 0 if unknown.
        """
        if start >= len(keys):
            return
        if cache.process in self._reporting:
            expected = self._expected.get(cache)
            if expected is None:
                expected = self._expected[cache] = ExpectedBlocks()
            expected.add(keys, self._clock() + seconds + _CONFIRM_SECONDS, start)
            return
        keys = keys[start:]
        estimated = self._estimated.setdefault(cache, {})
        self._index.store(cache, keys)
        _forget(estimated, keys)
        estimated |= dict.fromkeys(keys, self._clock() + seconds + _REMEMBER_SECONDS)
        most_blocks = min(most_blocks or _MOST_ESTIMATED, _MOST_ESTIMATED)
        if len(estimated) > most_blocks:
            self._index.remove(cache, _pop_first(estimated, len(estimated) - most_blocks))

    def renew(self, cache: Cache, keys: Sequence[int], count: int) -> None:
        """Notes that the first blocks were used again: if a cache is not reported, they are the last to be evicted."""
        estimated = self._estimated.get(cache)
        if not estimated:
            return
        known = [key for key in keys[:count] if key in estimated]
        _forget(estimated, known)
        estimated |= dict.fromkeys(known, self._clock() + _REMEMBER_SECONDS)

    def correct(self, cache: Cache, keys: Sequence[int]) -> None:
        """Notes that blocks were found not to be there."""
        self._index.remove(cache, keys)
        if cache in self._expected:
            self._expected[cache].withdraw(keys)
        if cache in self._estimated:
            _forget(self._estimated[cache], keys)

    def found(self, process: str, cached_blocks: int, believed_blocks: int) -> None:
        """Notes how much of a prompt a worker had. One that does not report and never has anything caches nothing."""
        if cached_blocks:
            self._cacheless.discard(process)
            self._misses.pop(process, None)
        elif believed_blocks and process not in self._reporting:
            misses = self._misses[process] = self._misses.get(process, 0) + 1
            if misses >= _MOST_MISSES:
                self._cacheless.add(process)

    def drop(self, process: str) -> None:
        """Forgets a worker that has left, or whose reports are not believed: it is estimated until it reports again."""
        self._reporting.discard(process)
        self._cacheless.discard(process)
        self._misses.pop(process, None)
        for cache in [cache for cache in self._index.holders if cache.process == process]:
            self._index.drop(cache)
            self._below.drop(cache)
            self._on_disk.drop(cache)
            self._tiered.discard(cache)
        for known in (self._expected, self._estimated):
            for cache in [cache for cache in known if cache.process == process]:
                del known[cache]

    def _expire(self) -> None:
        now = self._clock()
        if now < self._expire_at:
            return
        self._expire_at = now + _EXPIRY_STEP_SECONDS
        for expected in self._expected.values():
            expected.expire(now)
        for cache, estimated in self._estimated.items():
            if estimated and next(iter(estimated.values())) <= now:
                self._forget_expired(cache, estimated, now)

    def _forget_expired(self, cache: Cache, estimated: dict[int, float], now: float) -> None:
        gone = []
        for key, expires in estimated.items():
            if expires > now:
                break
            gone.append(key)
        _forget(estimated, gone)
        self._index.remove(cache, gone)


def _forget(estimated: dict[int, float], keys: Sequence[int]) -> None:
    for key in keys:
        estimated.pop(key, None)


def _first(keys: Sequence[int], count: int, holds: Callable[[int], bool]) -> int:
    """The number of keys before those that a tier holds, which are the last of the first `count`."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if holds(keys[middle]):
            high = middle
        else:
            low = middle + 1
    return low


def _pop_first(estimated: dict[int, float], count: int) -> list[int]:
    first = [key for key, _ in zip(estimated, range(count), strict=False)]
    _forget(estimated, first)
    return first
