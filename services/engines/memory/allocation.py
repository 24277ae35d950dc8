"""Which waiting request gets free blocks next, so that workers that hold KV for one another never wait in a circle.

There are three rules; docs/decisions.md gives the reasons. KV that is held for other workers takes at most a share of
the pool. A reservation waits for requests that run here, which end by themselves, but only briefly for held KV, whose
reader may be waiting too. A request that fits may pass requests that do not, at most `MAX_PASSES` times.
"""

import enum
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from services.engines.kv import NoFreeBlocks

MAX_PASSES = 32
"""How many later requests may get blocks before a request that does not fit yet."""
LOOK_AHEAD = 64
"""How many prompts, and how many reservations, that do not fit are tried before the search ends."""


@dataclass(frozen=True, slots=True)
class AllocationRules:
    """`held_share` of the pool may be held for other workers; one prompt may be held whatever its size.

    `held_wait_seconds` is how long a request waits if only held KV is in its way.
    """

    held_share: float = 1.0
    held_wait_seconds: float = 1.0


UNSHARED = AllocationRules()
"""The rules of a pool that is used for held KV alone, or for decoding alone."""


def uncount(references: Counter[int], blocks: Iterable[int]) -> None:
    """Takes one reference from each of these; those without any are no keys any more."""
    for block in blocks:
        if left := references[block] - 1:
            references[block] = left
        else:
            references.pop(block, None)  # not `del`, which is a method in Python


class KeptBlocks:
    """The blocks of prompts that are computed for or held for other workers, each counted once."""

    def __init__(self, total: int, rules: AllocationRules) -> None:
        self._total = total
        self._most = int(total * rules.held_share)
        self._references: Counter[int] = Counter()

    def add(self, blocks: Iterable[int]) -> None:
        """Counts the blocks of one more prompt."""
        self._references.update(blocks)

    def remove(self, blocks: Iterable[int]) -> None:
        """Removes the blocks of a prompt from the count."""
        uncount(self._references, blocks)

    def beside(self, blocks: Collection[int]) -> int:
        """Returns how many kept blocks are not among these."""
        return len(self._references) - sum(block in self._references for block in blocks)

    def may_add(self, cached: Sequence[int], missing: int) -> bool:
        """True if another prompt with these cached blocks and `missing` new ones may be computed for another worker."""
        return not self._references or self.beside(cached) + len(cached) + missing <= self._most

    def may_lend(self, blocks: Collection[int]) -> bool:
        """True if these may be lent: a loan is never needed, so none is larger than the share."""
        return self.beside(blocks) + len(blocks) <= self._most

    def room_to_lend(self, blocks: Collection[int]) -> int:
        """Returns how many blocks may be lent beside these."""
        return self._most - self.beside(blocks) - len(blocks)

    def fits_beside_kept(self, cached: Sequence[int], missing: int) -> bool:
        """True if a request would fit if only kept blocks were in the pool. If not, it waits for other workers."""
        return self.beside(cached) + len(cached) + missing <= self._total


class Grant(enum.Enum):
    """The result of offering free blocks to a waiting request."""

    GRANTED = "granted"
    POOL_FULL = "pool full"  # until requests that run here end
    HELD = "held"  # until other workers release held KV
    LATER = "later"  # for another reason than blocks


class Waits(Protocol):
    """A request that waits for blocks: a prompt, or, if it `reserves`, a reservation for a pull."""

    passed: int

    @property
    def reserves(self) -> bool: ...


Item = TypeVar("Item", bound=Waits)


def grant_blocks(waiting: deque[Item], offer: Callable[[Item], Grant]) -> None:
    """Offers free blocks in the order of arrival, and removes each request that takes them from the queue.

    A request that was passed `MAX_PASSES` times ends the round, unless it waits for other workers. In that case it
    stops prompts only: those workers may be waiting for reservations here.
    """
    behind: dict[bool, list[Item]] = {True: [], False: []}
    are_prompts_held_up = False
    for item in tuple(waiting):
        if len(behind[item.reserves]) >= LOOK_AHEAD or (are_prompts_held_up and not item.reserves):
            continue
        found = offer(item)
        if found is Grant.GRANTED:
            waiting.remove(item)
            _count_pass(behind)
        elif found is not Grant.LATER:
            behind[item.reserves].append(item)
            if item.passed >= MAX_PASSES and found is Grant.POOL_FULL:
                return
            are_prompts_held_up |= item.passed >= MAX_PASSES


def no_free_blocks(rules: AllocationRules) -> NoFreeBlocks:
    """Returns the error of a reservation for which held KV has left no room for too long."""
    return NoFreeBlocks(
        f"no free blocks for {rules.held_wait_seconds:g} s: KV is held for other workers",
        retry_after_seconds=rules.held_wait_seconds,
    )


def _count_pass(behind: dict[bool, list[Item]]) -> None:
    for items in behind.values():
        for item in items:
            item.passed += 1
