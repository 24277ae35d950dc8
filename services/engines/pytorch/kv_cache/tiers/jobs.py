"""Blocks on their way between the tiers: what is to be copied, and how far it is.

The measured speeds of loading and of computing, and which of both is sooner.
"""

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


# The weight of a new measurement.
_STEP = 0.2
# What is assumed before anything is measured, in bytes a second.
_PRIORS = {KvTier.HOST: 5e9, KvTier.DISK: 1e9}
# A load takes so long however little it loads.
_LOAD_BASE_SECONDS = 0.002
# Of the loads that are not worth it one in so many is made, to notice when they are again: a link is measured by loads
# only, and a single one that was held up would otherwise end them for good.
_TRIAL = 20
# A load that takes no longer than this is never late.
_LEAST_PATIENCE_SECONDS = 0.05


class Rates:
    """Seconds of loads, by tier, and of prompts; moving averages of what was measured."""

    def __init__(self, block_bytes: int, block_tokens: int) -> None:
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._bytes_per_second = dict(_PRIORS)
        self._measured: set[KvTier] = set()
        self._token_seconds: float | None = None
        self._refused = 0

    def loaded(self, tier: KvTier, blocks: int, seconds: float) -> None:
        """Notes a load."""
        rate = blocks * self._block_bytes / max(seconds, 1e-6)
        before = self._bytes_per_second[tier] if tier in self._measured else rate
        self._bytes_per_second[tier] = before + _STEP * (rate - before)
        self._measured.add(tier)

    def computed(self, tokens: int, seconds: float) -> None:
        """Notes a prompt that was computed."""
        if tokens <= 0:
            return
        latest = seconds / tokens
        before = latest if self._token_seconds is None else self._token_seconds
        self._token_seconds = before + _STEP * (latest - before)

    def load_seconds(self, tier: KvTier, blocks: int) -> float:
        """The predicted seconds of a load."""
        return _LOAD_BASE_SECONDS + blocks * self._block_bytes / self._bytes_per_second[tier] if blocks else 0.0

    def compute_seconds(self, blocks: int) -> float | None:
        """The predicted seconds to compute blocks; None before anything was measured."""
        return None if self._token_seconds is None else blocks * self._block_tokens * self._token_seconds

    def worth_loading(self, host: int, disk: int) -> int:
        """Returns how many of the next blocks are sooner loaded than computed: none, those in host memory, or all. One
        in 20 times it is all, even so.
        """
        whole, part = self.compute_seconds(host + disk), self.compute_seconds(host)
        if whole is None or part is None:
            return host + disk
        from_host, from_disk = self.load_seconds(KvTier.HOST, host), self.load_seconds(KvTier.DISK, disk)
        seconds = {0: whole, host: from_host + (whole - part), host + disk: from_host + from_disk}
        best = min(seconds, key=lambda blocks: (seconds[blocks], -blocks))
        self._refused += best < host + disk
        is_trial = best < host + disk and self._refused % _TRIAL == 0
        return host + disk if is_trial else best

    def patience_seconds(self, blocks: int) -> float:
        """The longest wait for a load of blocks: as long as it takes to compute them."""
        seconds = self.compute_seconds(blocks)
        return float("inf") if seconds is None else max(_LEAST_PATIENCE_SECONDS, seconds)
