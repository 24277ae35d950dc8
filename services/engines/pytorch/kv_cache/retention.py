"""Which cached blocks are evicted first: those of ended sessions, then the least recently used, retained ones last.

Which blocks sessions have, so that those of an ended session are known that no other one has used.
"""

import math
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.engines.prompt import Retain, Session
from services.engines.running import metrics

RETAINED_SHARE: Final = 0.25
"""Of a pool, the most that one tenant retains by default."""
MOST_TENANTS: Final = 16
"""So many tenants are told of in a worker's load."""
_SWEEP_SECONDS: Final = 1.0  # between two searches for what has expired, which look at all that is retained


@dataclass(frozen=True, slots=True)
class _Kept:
    """The time until which blocks are retained, how much that matters, and the tenant that they count to."""

    until: float
    priority: int
    tenant: bytes


class EvictionOrder:
    """The unused blocks that have content, in the order in which they are evicted. Blocks of equal rank: oldest first.

    A tenant retains at most `tenant_blocks`. The mappings are the pool's own: of the blocks that have content.
    """

    def __init__(
        self,
        hash_of: Mapping[int, bytes],
        block_of: Mapping[bytes, int],
        tenant_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hash_of = hash_of
        self._block_of = block_of
        self._tenant_blocks = tenant_blocks
        self._clock = clock
        self._dead: OrderedDict[int, None] = OrderedDict()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._retained: dict[int, OrderedDict[int, None]] = {}  # by priority
        self._kept: dict[bytes, _Kept] = {}
        self._kept_by: Counter[bytes] = Counter()
        self._most_kept: Sequence[tuple[bytes, int]] = ()
        self._most_kept_until = -math.inf
        self._next_sweep = math.inf

    def __len__(self) -> int:
        return len(self._dead) + len(self._idle) + sum(map(len, self._retained.values()))

    @property
    def unretained(self) -> int:
        """The blocks that no tenant retains."""
        return len(self._dead) + len(self._idle)

    @property
    def has_dead(self) -> bool:
        """True if the block to be evicted is of an ended session."""
        return bool(self._dead)

    def add(self, block: int) -> None:
        """Adds a block that has become unused."""
        kept = self._kept.get(self._hash_of[block])
        if kept is None:
            self._idle[block] = None
        else:
            self._retained.setdefault(kept.priority, OrderedDict())[block] = None

    def discard(self, block: int) -> None:
        """Removes a block that is used again, if it was unused."""
        for blocks in (self._idle, self._dead, *self._retained.values()):
            if block in blocks:
                del blocks[block]
                return

    def pop(self) -> int:
        """Removes the block to be evicted, of which there must be one."""
        self._sweep()
        if self._dead or self._idle:
            return (self._dead or self._idle).popitem(last=False)[0]
        lowest = min(priority for priority, blocks in self._retained.items() if blocks)
        metrics.RETAINED_BLOCKS_EVICTED.inc()
        return self._retained[lowest].popitem(last=False)[0]

    def mark_dead(self, links: Iterable[bytes]) -> int:
        """Lets the unused blocks among these be evicted first, unless they are retained. Returns how many."""
        cached = [self._block_of[link] for link in links if link in self._block_of]
        blocks = [block for block in cached if block in self._idle]
        for block in blocks:
            del self._idle[block]
            self._dead[block] = None
        return len(blocks)

    def retain(self, links: Sequence[bytes], retain: Retain) -> int:
        """Retains cached blocks, from the first on. Returns how many of them, within the tenant's bound."""
        self._sweep()
        wanted = _Kept(self._clock() + retain.seconds, retain.priority, retain.tenant)
        left = self._tenant_blocks - self._kept_by[retain.tenant]
        granted = 0
        for link in links:
            kept = self._kept.get(link)
            if link not in self._block_of or (left <= 0 and (kept is None or kept.tenant != retain.tenant)):
                break
            granted += 1
            if kept is not None and kept.until >= wanted.until:
                continue
            if kept is not None and (kept.tenant, kept.priority) == (wanted.tenant, wanted.priority):
                self._kept[link] = wanted
                continue
            left -= kept is None or kept.tenant != wanted.tenant
            # A tenant that has the same prompt must not take away from how much it matters to another one.
            is_others = kept is not None and kept.tenant != wanted.tenant and kept.priority > wanted.priority
            self._keep(link, replace(wanted, priority=kept.priority) if kept is not None and is_others else wanted)
        self._next_sweep = min(self._next_sweep, wanted.until)
        return granted

    def retained_by(self) -> Sequence[tuple[bytes, int]]:
        """The tenants that retain most blocks, and how many; it may be a second old."""
        now = self._clock()
        if now >= self._most_kept_until:
            self._sweep()
            self._most_kept = self._kept_by.most_common(MOST_TENANTS)
            self._most_kept_until = now + _SWEEP_SECONDS
        return self._most_kept

    def forget(self, link: bytes) -> None:
        """Retains this block no longer."""
        kept = self._kept.pop(link, None)
        if kept is not None:
            self._count(kept.tenant, -1)

    def _keep(self, link: bytes, wanted: _Kept) -> None:
        """Retains a block, in use or not."""
        self.forget(link)
        block = self._block_of[link]
        is_unused = block in self._idle or block in self._dead or any(block in one for one in self._retained.values())
        if is_unused:
            self.discard(block)
        self._kept[link] = wanted
        self._count(wanted.tenant, 1)
        if is_unused:
            self.add(block)

    def _count(self, tenant: bytes, more: int) -> None:
        self._kept_by[tenant] += more
        if not self._kept_by[tenant]:
            del self._kept_by[tenant]

    def _sweep(self) -> None:
        """Returns what has expired to the other unused blocks, as the oldest: it has not been used since."""
        now = self._clock()
        if now < self._next_sweep:
            return
        for link in [link for link, kept in self._kept.items() if kept.until <= now]:
            block, retained = self._block_of[link], self._retained.get(self._kept[link].priority)
            self.forget(link)
            if retained is not None and block in retained:
                del retained[block]
                self._idle[block] = None
                self._idle.move_to_end(block, last=False)
        earliest = min((kept.until for kept in self._kept.values()), default=math.inf)
        self._next_sweep = max(earliest, now + _SWEEP_SECONDS)


_MOST_SESSIONS: Final = 4096
_MOST_CHAINS: Final = 4  # as long as the pool: links that are remembered, of all sessions


class Sessions:
    """The hash chain of each session's latest request, and the latest links that other requests have used.

    Of too many sessions, the most silent ones are forgotten: what they had counts as used by others.
    """

    def __init__(self, total_blocks: int) -> None:
        self._most_others = total_blocks
        self._others: OrderedDict[bytes, None] = OrderedDict()  # the least recently used first
        self._most_links = _MOST_CHAINS * total_blocks
        self._chains: OrderedDict[bytes, list[bytes]] = OrderedDict()
        self._parents: dict[bytes, bytes] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._holders: Counter[bytes] = Counter()
        self._links = 0

    def __len__(self) -> int:
        return len(self._chains)

    def record(self, session: Session, links: Sequence[bytes]) -> None:
        """Notes the chain of a request that has ended."""
        known = self._chains.setdefault(session.key, [])
        self._chains.move_to_end(session.key)
        common = _common(known, links)
        self._drop(known[common:])
        known[common:] = links[common:]
        self._holders.update(links[common:])
        self._links += len(links) - common
        self._set_parent(session)
        while len(self._chains) > _MOST_SESSIONS or (self._links > self._most_links and len(self._chains) > 1):
            oldest, chain = next(iter(self._chains.items()))
            self._forget(oldest)
            self.record_other(chain)

    def record_other(self, links: Sequence[bytes]) -> None:
        """Notes the chain of a request without a session."""
        others = self._others
        # The end of a chain is forgotten before its beginning, which more requests have.
        for link in reversed(links):
            others[link] = None
            others.move_to_end(link)
        while len(others) > self._most_others:
            others.popitem(last=False)

    def own(self, links: Sequence[bytes]) -> list[bytes]:
        """Returns those of the links that one session has, and no other request."""
        return [link for link in links if self._holders[link] == 1 and link not in self._others]

    def end(self, key: bytes) -> Iterator[bytes]:
        """Forgets a session and those that are a part of it. Yields the links that no other one has, ends first."""
        ended, waiting = {key}, [key]
        for one in waiting:
            children = [child for child in self._children.get(one, ()) if child not in ended]
            ended.update(children)
            waiting += children
        for one in waiting:
            yield from (link for link in reversed(self._forget(one)) if link not in self._others)

    def _forget(self, key: bytes) -> list[bytes]:
        """Returns the links that only this session had."""
        self._detach(key)
        return self._drop(self._chains.pop(key, []))

    def _drop(self, links: Sequence[bytes]) -> list[bytes]:
        self._links -= len(links)
        own = []
        for link in links:
            self._holders[link] -= 1
            if not self._holders[link]:
                del self._holders[link]
                own.append(link)
        return own

    def _set_parent(self, session: Session) -> None:
        if session.parent and self._parents.get(session.key) != session.parent:
            self._detach(session.key)
            self._parents[session.key] = session.parent
            self._children.setdefault(session.parent, {})[session.key] = None

    def _detach(self, key: bytes) -> None:
        parent = self._parents.pop(key, b"")
        siblings = self._children.get(parent)
        if siblings is not None:
            siblings.pop(key, None)
            if not siblings:
                del self._children[parent]


def _common(known: Sequence[bytes], links: Sequence[bytes]) -> int:
    """The number of links that two chains begin with. Where two chains have the same link, they are the same so far."""
    most = min(len(known), len(links))
    return bisect_left(range(most), True, key=lambda index: known[index] != links[index])
