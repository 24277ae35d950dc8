"""Blocks on their way between the tiers: what is to be copied, and how far it is."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.engines.kv_events import KvTier
from services.engines.pytorch.kv_cache.tiers.directory import Place, Spill
from services.engines.pytorch.kv_cache.tiers.disk import Buffer
from services.engines.seals import BlockContents


@dataclass(eq=False, slots=True)
class Write:
    """A block on its way from host memory to the disk, through a buffer, since its slot is needed at once."""

    spill: Spill
    buffer: Buffer
    is_done: bool = False
    failure: str = ""


@dataclass(eq=False, slots=True)
class Demotion:
    """A block on its way from the pool to a slot in host memory, which the block of `write` leaves before."""

    block: int
    slot: int
    contents: BlockContents
    write: Write | None
    is_done: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class LoadItem:
    """A block to load: from where, what it must contain, and into which block of the pool."""

    place: Place
    contents: BlockContents
    block: int


@dataclass(eq=False, slots=True)
class Load:
    """The blocks that a request waits for, in the order of its prompt, and how many of them are there and checked.

    It ends with the first one that fails. After `cancel` nothing is written any more.
    """

    items: Sequence[LoadItem]
    after: Sequence[Demotion]  # what must have left, from the slots and from the blocks of the pool
    late_at: float
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    checked: int = 0
    is_done: bool = False
    is_cancelled: bool = False
    failure: str = ""
    is_damaged: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def tier(self) -> KvTier:
        """The slowest tier that it reads."""
        return max(item.place.tier for item in self.items)
