"""The blocks that one prefix cache will report soon, because prompts with them were sent to its worker."""

from collections.abc import Callable, Collection, Sequence

# How many blocks two prompts are first compared by; then by twice as many.
_FIRST_STEP = 16
# Whether the cache has reported a block.
_IsReported = Callable[[int], bool]


class _Expected:
    """Blocks of one prompt: from `start` up to `end`."""

    __slots__ = ("end", "expires", "keys", "start")

    def __init__(self, keys: Sequence[int], start: int, expires: float) -> None:
        self.keys = keys
        self.start = start
        self.end = len(keys)
        self.expires = expires

    def skip(self, keys: Sequence[int]) -> None:
        """Moves `start` beyond these blocks if they are the next ones: the usual report, in one comparison."""
        count = min(len(keys), self.end - self.start)
        if self.keys[self.start : self.start + count] == keys[:count]:
            self.start += count


class ExpectedBlocks:
    """The prompts of which a cache has not reported all blocks, each one by its first block that is missing.

    A block's key names all blocks before it, too. So where two prompts have equal keys, all before them are equal, and
    a prompt of any length takes a few comparisons.
    """

    def __init__(self) -> None:
        self._by_first: dict[int, _Expected] = {}
        self.firsts: Collection[int] = self._by_first  # the first missing block of each prompt

    def __len__(self) -> int:
        return len(self._by_first)

    def add(self, keys: Sequence[int], expires: float, start: int = 0) -> None:
        """Adds a prompt of which the cache does not have the blocks from `start` on, at least one."""
        self._by_first[keys[start]] = _Expected(keys, start, expires)

    def extent(self, keys: Sequence[int], count: int, now: float) -> int:
        """The number of a prompt's first blocks that are there if the expected ones follow the first `count`."""
        while count < len(keys):
            found = self._by_first.get(keys[count])
            if found is None or found.expires <= now:
                break
            count += _common(found, keys, count)
        return count

    def reported(self, keys: Sequence[int], is_reported: _IsReported) -> None:
        """Notes that the cache has reported blocks."""
        for key in self._by_first.keys() & keys:
            found = self._by_first.pop(key)
            found.skip(keys[keys.index(key) :])
            while found.start < found.end and is_reported(found.keys[found.start]):
                found.start += 1
            if found.start < found.end:
                self._by_first[found.keys[found.start]] = found

    def withdraw(self, keys: Sequence[int]) -> None:
        """Takes back blocks, consecutive ones of a prompt, and those that come after them in the same prompt."""
        if not keys or self._by_first.pop(keys[0], None) is not None:
            return
        for found in self._by_first.values():
            if keys[0] in found.keys[found.start : found.end]:
                found.end = found.keys.index(keys[0], found.start)
                return

    def expire(self, now: float) -> None:
        """Forgets what should have been reported by now."""
        gone = [key for key, found in self._by_first.items() if found.expires <= now]
        for key in gone:
            del self._by_first[key]


def _common(expected: _Expected, keys: Sequence[int], count: int) -> int:
    """The number of blocks of `expected`, from its first, that equal a prompt's from `count` on; at least one."""
    have, start = expected.keys, expected.start
    most = min(expected.end - start, len(keys) - count)
    # In growing steps, since keys that are not read need not be computed.
    equal, unequal, step = 1, most + 1, _FIRST_STEP
    while unequal - equal > 1:
        middle = min(equal + step, most) if unequal > most else (equal + unequal) // 2
        if have[start + middle - 1] == keys[count + middle - 1]:
            equal, step = middle, 2 * step
        else:
            unequal = middle
    return equal
