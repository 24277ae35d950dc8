"""Blocks on their way between the tiers: what is to be copied, and how far it is.

The measured speeds of loading and of computing, and which of both is sooner.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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


class LoadItem(NamedTuple):
    """A block to load: from where, what it must contain, into which block of the pool, and after what has left both."""

    place: Place
    contents: BlockContents
    block: int
    after: Sequence[Demotion] = ()


@dataclass(eq=False, slots=True)
class Load:
    """The blocks that a request waits for, in the order of its prompt, and how many of them are there and checked.

    It ends with the first one that fails. After `cancel` nothing is written any more.
    """

    items: Sequence[LoadItem]
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


# How much of a measurement's weight is left when the next one comes.
_KEPT = 0.8
# What is assumed before anything is measured, in bytes a second.
_PRIORS = {KvTier.HOST: 5e9, KvTier.DISK: 1e9}
# A load takes so long however little it loads: it is begun and ended between two steps.
_LOAD_BASE_SECONDS = 0.005
# A single measurement counts at most as so many times what is predicted.
_MOST_RATIO = 32.0
# Of the loads that are not worth it a little of one in so many is made, to notice when they are again: a link is
# measured by loads only, and a single one that was held up would otherwise end them for good.
_TRIAL = 20
# Such a trial may take this share of the time to compute all.
_TRIAL_SHARE = 0.02
# A load that takes no longer than this is never late.
_LEAST_PATIENCE_SECONDS = 0.05


class _Pace:
    """Seconds for each unit of an amount, beside a time that any amount takes. Large and late amounts count most."""

    def __init__(self, base_seconds: float, prior: float | None) -> None:
        self._base_seconds = base_seconds
        self._prior = prior
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Adds a measurement. One that was held up says little."""
        expected, more = self.unit_seconds, max(0.0, seconds - self._base_seconds)
        if expected:
            more = min(more, _MOST_RATIO * amount * expected)
        self._amount = _KEPT * self._amount + amount
        self._seconds = _KEPT * self._seconds + more

    @property
    def unit_seconds(self) -> float | None:
        """The seconds of a unit; the prior before anything was measured."""
        return self._seconds / self._amount if self._amount else self._prior


class Rates:
    """Seconds of loads, by tier, and of prompts; moving averages of what was measured.

    Any prompt, also one that is loaded, takes `step_seconds`: loading does not save them.
    """

    def __init__(self, block_bytes: int, block_tokens: int, step_seconds: float = 0.0) -> None:
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._bytes = {tier: _Pace(_LOAD_BASE_SECONDS, 1 / prior) for tier, prior in _PRIORS.items()}
        self._step_seconds = step_seconds
        # By the power of two above their length: attention makes the tokens of long prompts dearer.
        self._prompts: dict[int, _Pace] = {}
        self._refused = 0

    def loaded(self, tier: KvTier, blocks: int, seconds: float) -> None:
        """Notes a load."""
        self._bytes[tier].add(blocks * self._block_bytes, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """Notes a prompt that was computed."""
        if tokens > 0:
            pace = self._prompts.setdefault(tokens.bit_length(), _Pace(self._step_seconds, None))
            pace.add(tokens, seconds)

    def load_seconds(self, tier: KvTier, blocks: int) -> float:
        """The predicted seconds of a load."""
        pace = self._bytes[tier].unit_seconds
        assert pace is not None
        return _LOAD_BASE_SECONDS + blocks * self._block_bytes * pace if blocks else 0.0

    def compute_seconds(self, blocks: int) -> float | None:
        """The predicted seconds that blocks add to a prompt, as in measured prompts of about this length; None before
        anything was measured.
        """
        if not self._prompts:
            return None
        tokens = blocks * self._block_tokens
        nearest = min(self._prompts, key=lambda length: (abs(length - tokens.bit_length()), length))
        return tokens * (self._prompts[nearest].unit_seconds or 0.0)

    def worth_loading(self, host: int, disk: int) -> int:
        """Returns how many of the next blocks are sooner loaded than computed: none, those in host memory, or all. One
        in 20 times it is some more, as many as take little of the time to compute all.
        """
        whole, part = self.compute_seconds(host + disk), self.compute_seconds(host)
        if whole is None or part is None:
            return host + disk
        from_host, from_disk = self.load_seconds(KvTier.HOST, host), self.load_seconds(KvTier.DISK, disk)
        seconds = {0: whole, host: from_host + (whole - part), host + disk: from_host + from_disk}
        best = min(seconds, key=lambda blocks: (seconds[blocks], -blocks))
        if best == host + disk:
            return best
        self._refused += 1
        if self._refused % _TRIAL:
            return best
        left, taken = (host, from_host) if best < host else (disk, from_disk)
        return best + max(1, min(left, int(left * _TRIAL_SHARE * whole / taken)))

    def patience_seconds(self, blocks: int) -> float:
        """The longest wait for a load of blocks: as long as it takes to compute them."""
        seconds = self.compute_seconds(blocks)
        return float("inf") if seconds is None else max(_LEAST_PATIENCE_SECONDS, seconds)
