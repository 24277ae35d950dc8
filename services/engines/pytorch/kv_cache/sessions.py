"""Which blocks sessions have, so that those of an ended session are known that nobody else has used."""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from services.engines.prompt import Session

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

    def end(self, key: bytes) -> Iterator[bytes]:
        """Forgets a session and those that are a part of it. Yields the links that nobody else has, ends first."""
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
