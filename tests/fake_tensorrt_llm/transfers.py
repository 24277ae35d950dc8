"""KV that an LLM of the stand-in holds for others, and how it gets to them."""

import itertools
import time
from dataclasses import dataclass

from fake_tensorrt_llm.fabric import FileFabric

_FIRST_ID = 2**60 + 1  # Beyond what a JSON number carries.


@dataclass(slots=True)
class Committed:
    """KV of a prompt, held by the LLM that computed it. An answer follows from its `meaning`."""

    owner: "Transfers"
    blocks: int
    deadline: float
    meaning: tuple[int, ...]


# By the id of the context request: what every LLM of this process can fetch.
FABRIC: dict[int, Committed] = {}
_ids = itertools.count()


def next_context_id(node_id: int = 0, process_id: int = 0) -> int:
    """Never the same twice on one node: what tells nodes apart is their number alone."""
    return _FIRST_ID + (node_id << 40) + (process_id << 32) + next(_ids)


def node_of(number: int) -> tuple[int, int]:
    """Node and process of an id."""
    rest = number - _FIRST_ID
    return rest >> 40, rest >> 32 & 63


class Transfers:
    """One LLM's side. Whatever is asked of it, what it holds goes in two ways: fetched, or after its time."""

    def __init__(self, folder: str) -> None:
        self._files = FileFabric(folder) if folder else None
        self.freed = 0

    def commit(self, number: int, blocks: int, seconds: float, meaning: tuple[int, ...]) -> None:
        """Holds it."""
        FABRIC[number] = Committed(self, blocks, time.monotonic() + seconds, meaning)
        if self._files is not None:
            self._files.publish(number, meaning)

    def take_freed(self) -> int:
        """Blocks that have come back since the last call."""
        now = time.monotonic()
        for number, held in list(FABRIC.items()):
            was_fetched = self._files is not None and not self._files.has(number)
            if held.owner is self and (held.deadline < now or was_fetched):
                self._let_go(number)
        freed, self.freed = self.freed, 0
        return freed

    def fetch(self, number: int) -> tuple[int, ...] | None:
        """Takes it from its owner; None if it is not held."""
        if self._files is not None:
            return self._files.take(number)
        held = FABRIC.pop(number, None)
        if held is None:
            return None
        held.owner.freed += held.blocks
        return held.meaning

    def _let_go(self, number: int) -> None:
        self.freed += FABRIC.pop(number).blocks
        if self._files is not None:
            self._files.withdraw(number)
