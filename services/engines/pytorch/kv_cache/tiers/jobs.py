"""Blocks on their way between the tiers: what is to be copied, and how far it is.

The measured speeds of loading and of computing, and which of both is sooner.
"""

import math
import threading
import time
from collections import Counter, defaultdict, deque
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


@dataclass(eq=False, slots=True)
class PrefixLoad:
    """All blocks that a request waits for, in loads of a part each, of which the next ones begin later.

    `contents` go into `blocks`; of the first `end` of them, the others are not loaded after all, `begun` are on their
    way or there.
    """

    contents: Sequence[BlockContents]
    blocks: Sequence[int]
    late_at: float
    end: int
    begun: int = 0
    parts: deque[Load] = field(default_factory=deque)
    loaded: Counter[KvTier] = field(default_factory=Counter)  # blocks that are there
    tokens: Counter[KvTier] = field(default_factory=Counter)  # of those

    @property
    def has_more(self) -> bool:
        """True if the load of some has not begun."""
        return self.begun < self.end

    @property
    def is_whole(self) -> bool:
        """True if all are there."""
        return self.loaded.total() == len(self.contents)

    def waiting(self, most: int) -> Sequence[BlockContents]:
        """The next blocks whose load has not begun."""
        return self.contents[self.begun : min(self.end, self.begun + most)]


# How much of a measurement's weight is left when the next one comes.
_KEPT = 0.8
# What is assumed before anything is measured, in bytes a second.
_PRIORS = {KvTier.HOST: 5e9, KvTier.DISK: 1e9}
# A load takes so long however little it loads: it is begun and ended between two steps.
_LOAD_BASE_SECONDS = 0.005
# How exact a measured load is, and by how much its cost may have changed since the one before.
_NOISE, _DRIFT = 0.2, 0.3
# A load says how fast the link is as far as it is as long as the longest one lately: so much of that is left when the
# next load comes.
_LONGEST_KEPT = 0.998
_LEAST_LOAD_SECONDS, _LEAST_BLOCK_SECONDS = 1e-3, 1e-9
# A single measurement of a prompt, and of a load, counts at most as so many times what is predicted.
_MOST_RATIO, _MOST_LOAD_RATIO = 32.0, 4.0
# Of the loads that are not worth it a little of one in so many is made at most, to notice when they are again: a link
# is measured by loads only, and a single one that was held up would otherwise end them for good.
_TRIAL = 20
# Trials of prompts between two powers of two may take this share of the time to compute these: at most twice of it of
# the shorter ones.
_TRIAL_SHARE = 0.01
# A load that takes no longer than this is never late.
_LEAST_PATIENCE_SECONDS = 0.05


class _Pace:
    """Seconds for each unit of an amount, beside a time that any amount takes. Large and late amounts count most."""

    def __init__(self, base_seconds: float) -> None:
        self._base_seconds = base_seconds
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
        """The seconds of a unit; None before anything was measured."""
        return self._seconds / self._amount if self._amount else None


class _LoadCost:
    """Seconds of a load: those that any takes, and those of each block, told apart by loads of several lengths.

    A Kalman filter of both numbers. Either may be wrong by as much as it is at most, as before anything was measured.
    """

    def __init__(self, base_seconds: float, block_seconds: float) -> None:
        self._base, self._block = base_seconds, block_seconds
        self._base_variance, self._covariance, self._block_variance = base_seconds**2, 0.0, block_seconds**2
        self._longest = 0.0

    @property
    def block_seconds(self) -> float:
        """The seconds of a block beside others."""
        return self._block

    def seconds(self, blocks: int) -> float:
        """The predicted seconds."""
        return self._base + blocks * self._block if blocks else 0.0

    def cautious_seconds(self, blocks: int) -> float:
        """The predicted seconds if what any load takes is a standard deviation more: of a short load it is nearly all,
        and a prompt that is loaded must not be slower than one that is computed.
        """
        return self.seconds(blocks) + math.sqrt(self._base_variance) if blocks else 0.0

    def add(self, blocks: int, seconds: float) -> None:
        """Adds a measurement. One that was held up says little."""
        expected = self.seconds(blocks)
        error = min(seconds, _MOST_LOAD_RATIO * expected) - expected
        # Long loads say little of what any takes: it is not the less certain the more of them there are.
        drifted = self._base_variance + (_DRIFT * self._base) ** 2
        self._base_variance = max(self._base_variance, min(drifted, self._base**2))
        # And short ones little of a block: many that were held up must not end the loads of long prompts.
        self._longest = max(_LONGEST_KEPT * self._longest, blocks)
        self._block_variance += (_DRIFT * self._block * blocks / self._longest) ** 2
        with_base = self._base_variance + blocks * self._covariance
        with_block = self._covariance + blocks * self._block_variance
        variance = with_base + blocks * with_block + (_NOISE * expected) ** 2
        self._base = max(0.0, self._base + with_base / variance * error)
        self._block = max(_LEAST_BLOCK_SECONDS, self._block + with_block / variance * error)
        self._base_variance -= with_base**2 / variance
        self._covariance -= with_base * with_block / variance
        self._block_variance -= with_block**2 / variance


class Rates:
    """Seconds of loads, by tier, and of prompts, as they were measured.

    Any prompt, also one that is loaded, takes `step_seconds`: loading does not save them. `load_seconds` are those of
    a load of one block from host memory.
    """

    def __init__(
        self,
        block_bytes: int,
        block_tokens: int,
        step_seconds: float = 0.0,
        load_seconds: float | None = None,
    ) -> None:
        self._block_tokens = block_tokens
        load_seconds = _LOAD_BASE_SECONDS if load_seconds is None else max(_LEAST_LOAD_SECONDS, load_seconds)
        self._loads = {tier: _LoadCost(load_seconds, block_bytes / prior) for tier, prior in _PRIORS.items()}
        self._step_seconds = step_seconds
        # By the power of two above their length: attention makes the tokens of long prompts dearer.
        self._prompts: dict[int, _Pace] = {}
        # Of those, too: how many were not loaded in whole, and the time that their trials may take.
        self._refused = Counter[int]()
        self._trial_seconds = defaultdict[int, float](float)

    def loaded(self, tier: KvTier, blocks: int, seconds: float) -> None:
        """Notes a load."""
        self._loads[tier].add(blocks, seconds)

    def resumed(self, tier: KvTier, blocks: int, tokens: int, seconds: float) -> None:
        """Notes a prompt of which so many blocks were loaded and the other tokens computed. A load also takes the time
        until a step sees its end.
        """
        self.loaded(tier, blocks, max(0.0, seconds - self._step_seconds - (self._tokens_seconds(tokens) or 0.0)))

    def computed(self, tokens: int, seconds: float) -> None:
        """Notes a prompt that was computed."""
        if tokens > 0:
            pace = self._prompts.setdefault(tokens.bit_length(), _Pace(self._step_seconds))
            pace.add(tokens, seconds)

    def load_seconds(self, tier: KvTier, blocks: int) -> float:
        """The predicted seconds of a load."""
        return self._loads[tier].seconds(blocks)

    def compute_seconds(self, blocks: int) -> float | None:
        """The predicted seconds that blocks add to a prompt; None before anything was measured."""
        return self._tokens_seconds(blocks * self._block_tokens)

    def _tokens_seconds(self, tokens: int) -> float | None:
        """The estimate by measured prompts of about this length."""
        if not self._prompts:
            return None
        nearest = min(self._prompts, key=lambda length: (abs(length - tokens.bit_length()), length))
        return tokens * (self._prompts[nearest].unit_seconds or 0.0)

    def worth_loading(self, host: int, disk: int) -> int:
        """Returns how many of the next blocks are sooner loaded than computed: none, those in host memory, or all. Now
        and then it is some more, as many as take little of the time to compute what was not loaded.
        """
        whole, part = self.compute_seconds(host + disk), self.compute_seconds(host)
        if whole is None or part is None:
            return host + disk
        from_host, from_disk = (
            self._loads[tier].cautious_seconds(blocks) for tier, blocks in ((KvTier.HOST, host), (KvTier.DISK, disk))
        )
        seconds = {0: whole, host: from_host + (whole - part), host + disk: from_host + from_disk}
        best = min(seconds, key=lambda blocks: (seconds[blocks], -blocks))
        if best == host + disk:
            return best
        tier, left = (KvTier.HOST, host) if best < host else (KvTier.DISK, disk)
        length = (host + disk).bit_length()
        self._refused[length] += 1
        self._trial_seconds[length] += _TRIAL_SHARE * whole
        return best + self._trial_blocks(tier, left, length)

    def _trial_blocks(self, tier: KvTier, left: int, length: int) -> int:
        """Returns how many blocks are loaded as a trial: none, before trials may take so much longer than computing."""
        cost, saved = self._loads[tier], (self.compute_seconds(left) or 0.0) / left
        lost, slower = cost.seconds(1) - saved, cost.block_seconds - saved
        seconds = self._trial_seconds[length]
        if self._refused[length] < _TRIAL or seconds < lost:
            return 0
        # As many as there is time for: more of them say more.
        blocks = left if slower <= 0 else min(left, 1 + int((seconds - lost) / slower))
        del self._refused[length], self._trial_seconds[length]
        return blocks

    def patience_seconds(self, blocks: int) -> float:
        """The longest wait for a load of blocks: as long as it takes to compute them."""
        seconds = self.compute_seconds(blocks)
        return float("inf") if seconds is None else max(_LEAST_PATIENCE_SECONDS, seconds)
