"""The tiers below the device pool, for the engine's thread: what leaves the pool, and what a request loads."""

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter

import structlog
import torch

from runtime.machine import available_bytes
from services.engines.base import MemoryTiers
from services.engines.kv import KvLayout
from services.engines.kv_events import KvTier
from services.engines.pytorch.kv_cache.digester import Digester
from services.engines.pytorch.kv_cache.events import BlockRemoved
from services.engines.pytorch.kv_cache.tiers.directory import Placed, TierDirectory, TierListener, count_off
from services.engines.pytorch.kv_cache.tiers.disk import Buffer, Buffers, DiskFile
from services.engines.pytorch.kv_cache.tiers.host import Copier, HostRegion
from services.engines.pytorch.kv_cache.tiers.jobs import Demotion, Load, LoadItem, Rates, Write
from services.engines.pytorch.kv_cache.tiers.moves import Movers
from services.engines.pytorch.kv_cache.tiers.options import TierOptions
from services.engines.running import metrics
from services.engines.seals import BlockContents, Sealer

log = structlog.get_logger(__name__)

# The longest wait of a step for blocks that leave the pool.
_SETTLE_SECONDS = 30.0
# So many failures of a tier within so many seconds take it out of use.
_MOST_FAILURES = 3
_FAILURE_SECONDS = 60.0
_AUTO_POOLS = 2
_AUTO_SHARE_OF_MEMORY = 0.5


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call to make once blocks have left the pool."""

    demotions: Sequence[Demotion]
    call: Callable[[], None]


class KvTiers:
    """Host memory and disk, their threads, and the decision between loading and computing.

    For the engine's thread only. `listener` hears of blocks that are in a tier, or in none any more.
    """

    def __init__(self, options: TierOptions, layout: KvLayout, pool: torch.Tensor, listener: TierListener) -> None:
        self._layout = layout
        self._patience_seconds = options.load_patience_seconds
        self.sealer = Sealer(layout, secrets.randbits(64))
        self._listener = listener
        self.rates = Rates(layout.block_bytes, layout.block_tokens)
        self._leaving: dict[int, Demotion] = {}  # by the block of the pool
        self._arriving: dict[bytes, Demotion] = {}
        self._demotions: deque[Demotion] = deque()
        self._writes: deque[Write] = deque()
        self._waiting: list[_Waiting] = []
        self._loading: Counter[bytes] = Counter()  # by how many loads: a block may leave the pool again during one
        self._expected: Counter[bytes] = Counter()  # those whose load begins soon
        self._back_in_pool: set[bytes] = set()  # of those that are loaded: computed or pulled meanwhile
        self._failures: dict[KvTier, deque[float]] = {KvTier.HOST: deque(), KvTier.DISK: deque()}
        self._tokens: Counter[str] = Counter()
        with ExitStack() as opened:
            self._open(options, pool, opened)
            self._opened = opened.pop_all()
        metrics.watch_tiers(self.directory)

    def _open(self, options: TierOptions, pool: torch.Tensor, opened: ExitStack) -> None:
        """Opens file, memory and threads; `opened` gets what is to be closed after the threads."""
        block_bytes, device, disk = self._layout.block_bytes, pool.device, options.disk
        self.disk = DiskFile(disk, block_bytes) if disk else None
        if self.disk is not None:
            opened.callback(self.disk.close)
        self.host = HostRegion(self._layout, _host_slots(options, self._layout, len(pool)), device)
        opened.callback(self.host.close)
        self._free_buffers: list[Buffer] = []
        if disk is not None:
            buffers = Buffers(block_bytes, max(1, int(disk.write_queue_bytes) // block_bytes), device)
            opened.callback(buffers.close)
            self._free_buffers += buffers.buffers
        disk_slots = self.disk.num_slots if self.disk else 0
        self.directory = TierDirectory(self.host.memory.num_blocks, disk_slots, self._listener)
        digester = Digester(block_bytes, device)
        self._movers = Movers(lambda: Copier(pool, digester), self.host, self.disk, self.sealer)
        self._movers.start()

    def close(self) -> None:
        """Ends the threads, and frees memory and file; both stay open if a thread hangs that may use them."""
        if self._movers.close():
            self._opened.close()

    @property
    def is_busy(self) -> bool:
        """True if a request waits for blocks to come or to go."""
        return bool(self._loading or self._expected or self._waiting)

    def demote(self, evicted: Sequence[tuple[int, bytes]]) -> Sequence[bytes]:
        """Takes over blocks that the pool evicts; returns the names of those that cannot be kept. Their content stays
        until `settle`.
        """
        tokens = self._layout.block_tokens
        kept = self._demote([(block, BlockContents(name, tokens)) for block, name in evicted])
        return [name for (_, name), is_kept in zip(evicted, kept, strict=True) if not is_kept]

    def park(self, block: int, contents: BlockContents) -> bool:
        """Takes over the unfinished last block of a preempted sequence."""
        self.directory.drop(contents.block_hash)
        [is_kept] = self._demote([(block, contents)])
        return is_kept

    def stored(self, block_hash: bytes) -> None:
        """Drops a copy, since the pool has the block again."""
        self.directory.drop(block_hash)
        if block_hash in self._loading:
            self._back_in_pool.add(block_hash)

    def lose(self, hashes: Sequence[bytes]) -> int:
        """Drops blocks that nobody will read again. Returns how many were here."""
        return sum(self.directory.lose(block_hash) for block_hash in hashes)

    def leave_first(self, hashes: Sequence[bytes]) -> None:
        """Lets blocks of a chain leave their tiers before all others."""
        self.directory.leave_first(hashes)

    def settle(self, blocks: Iterable[int]) -> None:
        """Waits until blocks of the pool may be written, because what they contained has left."""
        leaving = self._leaving
        if not leaving:
            return
        jobs = [job for job in (leaving.get(block) for block in blocks) if job is not None and not job.is_done]
        if jobs and not self._movers.demotions.wait(jobs, _SETTLE_SECONDS):
            raise RuntimeError(f"KV blocks have not left the pool within {_SETTLE_SECONDS:g} s")

    def when_settled(self, blocks: Sequence[int], call: Callable[[], None]) -> None:
        """Calls at once, or in a later `poll`, when these blocks of the pool may be written."""
        jobs = [self._leaving[block] for block in blocks if block in self._leaving]
        if all(job.is_done for job in jobs):
            call()
        else:
            self._waiting.append(_Waiting(jobs, call))

    def is_loading(self, block_hash: bytes) -> bool:
        """True if another request loads this block now, or soon: wait for it."""
        return block_hash in self._loading or block_hash in self._expected

    def expect(self, contents: Sequence[BlockContents]) -> None:
        """Notes that the loads of these blocks begin soon."""
        self._expected.update(list(map(itemgetter(0), contents)))

    def unexpect(self, contents: Sequence[BlockContents]) -> None:
        """Notes that they have begun, or will not begin."""
        for content in contents:
            count_off(self._expected, content.block_hash)

    def worth_loading(self, hashes: Sequence[bytes]) -> int:
        """Returns how many of the next blocks of a chain are sooner loaded than computed."""
        return self.rates.worth_loading(*self.directory.following(hashes))

    def late_at(self, num_blocks: int) -> float:
        """The time at which a load of so many blocks is late, if it begins now."""
        return time.monotonic() + min(self._patience_seconds, self.rates.patience_seconds(num_blocks))

    def load(self, contents: Sequence[BlockContents], blocks: Sequence[int], late_at: float | None = None) -> Load:
        """Starts to load blocks that are in the tiers into blocks of the pool."""
        items, take, leaving, arriving = list[LoadItem](), self.directory.take, self._leaving, self._arriving
        for content, block in zip(contents, blocks, strict=True):
            name = content.block_hash
            after = [job for job in (leaving.get(block), arriving.get(name)) if job is not None]
            items.append(LoadItem(take(name), content, block, after))
        self._loading.update(content.block_hash for content in contents)
        load = Load(items, self.late_at(len(items)) if late_at is None else late_at)
        self._movers.begin(load)
        return load

    def has_ended(self, load: Load) -> bool:
        """True if a load is complete, has failed, or is late, and is then given up."""
        if not load.is_done and time.monotonic() > load.late_at:
            self._movers.cancel(load)
            load.failure = load.failure or "late"
            load.is_done = True
        return load.is_done

    def finish(self, load: Load) -> Sequence[LoadItem]:
        """Ends a load, and returns the items that are in the pool now; the caller stores those there.

        Of the others, damaged ones are lost, and the rest stay where they were.
        """
        if not load.is_done:
            self._movers.cancel(load)
        loaded = load.items[: load.checked]
        for index, item in enumerate(load.items):
            if index < load.checked:
                self.directory.free(item.place)
                self._end(item)
                if item.contents.tokens < self._layout.block_tokens:  # the prefix cache does not have it
                    self._listener(BlockRemoved(item.contents.block_hash))
            elif index == load.checked and load.is_damaged:
                self._lose_damaged(load, item)
            else:
                self._put_back(item)
        self._count(load, loaded)
        return loaded

    def copied(self, load: Load) -> int:
        """Ends a load whose blocks stay in their tier, too; a damaged one is lost. Returns how many were copied."""
        if not load.is_done:
            self._movers.cancel(load)
        for index, item in enumerate(load.items):
            if index == load.checked and load.is_damaged:
                self._lose_damaged(load, item)
            else:
                self._put_back(item)
        self._count(load, load.items[: load.checked])
        if load.seconds:
            self.rates.loaded(load.tier, len(load.items), load.seconds)
        return load.checked

    def give_back(self, load: Load) -> None:
        """Ends a load whose request is gone: its blocks stay where they were."""
        if not load.is_done:
            self._movers.cancel(load)
        for item in load.items:
            self._put_back(item)

    def begin(self, step_seconds: float, load_seconds: float | None) -> None:
        """Forgets what was counted, since the warm-up is no client's work, but not what a step and a load took."""
        self._tokens.clear()
        self.rates = Rates(self._layout.block_bytes, self._layout.block_tokens, step_seconds, load_seconds)

    def found(self, prompt_tokens: int, cached_tokens: int, loaded: Mapping[KvTier, int]) -> None:
        """Counts a prompt, and how much of it was cached, of which some was loaded."""
        self._tokens["prompt"] += prompt_tokens
        self._tokens["device"] += cached_tokens - sum(loaded.values())
        for tier, tokens in loaded.items():
            self._tokens[tier.name.lower()] += tokens

    def sizes(self) -> MemoryTiers:
        """The sizes of the tiers, and the tokens that were found in them."""
        directory, tokens = self.directory, self._tokens
        return MemoryTiers(
            host_total=directory.total(KvTier.HOST),
            host_used=directory.used(KvTier.HOST),
            disk_total=directory.total(KvTier.DISK),
            disk_used=directory.used(KvTier.DISK),
            prompt_tokens=tokens["prompt"],
            device_tokens=tokens["device"],
            host_tokens=tokens["host"],
            disk_tokens=tokens["disk"],
        )

    def poll(self) -> None:
        """Notes what the threads have done since the last call."""
        demoted = 0
        while self._demotions and self._demotions[0].is_done:
            self._note_demoted(self._demotions.popleft())
            demoted += 1
        if demoted:
            metrics.TIER_BYTES.labels("host", "out").inc(demoted * self._layout.block_bytes)
        while self._writes and self._writes[0].is_done:
            self._note_written(self._writes.popleft())
        if self._waiting:
            ready = [each for each in self._waiting if all(job.is_done for job in each.demotions)]
            self._waiting = [each for each in self._waiting if each not in ready]
            for each in ready:
                each.call()

    def _put_back(self, item: LoadItem) -> None:
        """Leaves a block where it was, unless the pool has had it since: then no tier needs it."""
        if self._end(item):
            self.directory.free(item.place)
        else:
            self.directory.put_back(item.contents.block_hash, item.place)

    def _lose_damaged(self, load: Load, item: LoadItem) -> None:
        self.directory.free(item.place)
        if not self._end(item):
            self._listener(BlockRemoved(item.contents.block_hash))
        self._note_failure(item.place.tier, load.failure, is_damage=True)

    def _end(self, item: LoadItem) -> bool:
        """Ends the load of a block. Returns whether the pool has got the block from elsewhere since that began."""
        block_hash = item.contents.block_hash
        count_off(self._loading, block_hash)
        is_in_pool = block_hash in self._back_in_pool
        self._back_in_pool.discard(block_hash)
        return is_in_pool

    def _demote(self, leaving: Sequence[tuple[int, BlockContents]]) -> list[bool]:
        self.poll()
        jobs: list[Demotion] = []
        kept: list[bool] = []
        for block, contents in leaving:
            placed = self.directory.place(contents.block_hash, may_spill=bool(self._free_buffers))
            kept.append(placed is not None)
            if placed is not None:
                job = Demotion(block, placed.slot, contents, self._write_of(placed))
                self._leaving[block] = self._arriving[contents.block_hash] = job
                jobs.append(job)
        self._demotions += jobs
        self._movers.demotions.submit(jobs)
        return kept

    def _write_of(self, placed: Placed) -> Write | None:
        if placed.spill is None:
            return None
        write = Write(placed.spill, self._free_buffers.pop())
        self._writes.append(write)
        self.directory.unwritten[placed.spill.block_hash] += 1
        return write

    def _note_demoted(self, job: Demotion) -> None:
        block_hash = job.contents.block_hash
        if self._leaving.get(job.block) is job:
            del self._leaving[job.block]
        if self._arriving.get(block_hash) is job:
            del self._arriving[block_hash]
        if job.failure:
            self.directory.lose(block_hash)
            self._note_failure(KvTier.HOST, job.failure)

    def _note_written(self, write: Write) -> None:
        self._free_buffers.append(write.buffer)
        count_off(self.directory.unwritten, write.spill.block_hash)
        if write.failure:
            self.directory.lose(write.spill.block_hash)
            self._note_failure(KvTier.DISK, write.failure)
        metrics.TIER_BYTES.labels("disk", "out").inc(self._layout.block_bytes)

    def _note_failure(self, tier: KvTier, reason: str, *, is_damage: bool = False) -> None:
        """Counts and logs a failure; the third in a minute takes the tier out of use."""
        name = tier.name.lower()
        counter = metrics.DAMAGED_BLOCKS if is_damage else metrics.TIER_FAILURES
        counter.labels(name).inc()
        log.warning("kv block is damaged" if is_damage else "kv tier has failed", tier=name, reason=reason)
        times, now = self._failures[tier], time.monotonic()
        times.append(now)
        while times[0] < now - _FAILURE_SECONDS:
            times.popleft()
        if len(times) >= _MOST_FAILURES and self.directory.total(tier):
            log.error("kv tier is out of use", tier=name, failures=len(times), seconds=_FAILURE_SECONDS)
            self.directory.close(tier)

    def _count(self, load: Load, loaded: Sequence[LoadItem]) -> None:
        for tier in (KvTier.HOST, KvTier.DISK):
            found = [item for item in loaded if item.place.tier is tier]
            metrics.TIER_BYTES.labels(tier.name.lower(), "in").inc(len(found) * self._layout.block_bytes)
            metrics.TIER_HIT_TOKENS.labels(tier.name.lower()).inc(sum(item.contents.tokens for item in found))
            if tier is KvTier.DISK and found:
                self.directory.write_rule.read(len(found))
        if load.failure and not load.is_damaged:
            metrics.FAILED_LOADS.labels("late" if load.failure == "late" else "error").inc()
            if load.failure != "late":
                self._note_failure(load.tier, load.failure)


def _host_slots(options: TierOptions, layout: KvLayout, pool_blocks: int) -> int:
    if options.host_bytes != "auto":
        return max(1, int(options.host_bytes) // layout.block_bytes)
    share = int(available_bytes() * _AUTO_SHARE_OF_MEMORY)
    return max(1, min(_AUTO_POOLS * pool_blocks, share // layout.block_bytes))
