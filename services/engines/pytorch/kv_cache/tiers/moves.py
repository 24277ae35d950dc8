"""Blocks on their way between the tiers, and the threads that move them."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from services.engines.kv_events import KvTier
from services.engines.pytorch.kv_cache.tiers.directory import Place, Spill
from services.engines.pytorch.kv_cache.tiers.disk import Buffer, DiskFile
from services.engines.pytorch.kv_cache.tiers.host import Copier, HostRegion, computing_nothing
from services.engines.seals import BlockContents, DamagedBlock, Sealer

# So much is copied before its digests are read: long enough to hide what starting a copy takes.
_BATCH_BYTES = 32 << 20
# The longest wait of a load for blocks that are still on their way down.
_LEAVING_SECONDS = 10.0


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


Job = TypeVar("Job", Demotion, Write, Load)


class Mover(Generic[Job]):
    """A thread that runs jobs in order, several at once if they are waiting. A context manager: leaving ends it."""

    def __init__(
        self, name: str, device: torch.device, run: Callable[[Sequence[Job]], None], most_at_once: int = 1
    ) -> None:
        self._run: Callable[[Sequence[Job]], None] = run
        self._device = device
        self._most_at_once = most_at_once
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._main, name=f"baton-kv-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Adds a job."""
        self._jobs.put(job)

    def wait(self, jobs: Sequence[Job], seconds: float) -> bool:
        """Waits until all of these are done; False if they are not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: all(job.is_done for job in jobs), seconds)

    def close(self) -> None:
        """Ends the thread, after the jobs that run."""
        self._jobs.put(None)
        self._thread.join()

    def _main(self) -> None:
        with computing_nothing(self._device):
            while jobs := self._next():
                try:
                    self._run(jobs)
                except Exception as error:  # of whatever kind: the thread goes on, and the jobs' owner hears of it
                    for job in jobs:
                        job.failure = job.failure or str(error) or type(error).__name__
                with self._changed:
                    for job in jobs:
                        job.is_done = True
                    self._changed.notify_all()

    def _next(self) -> list[Job]:
        first = self._jobs.get()
        jobs = [] if first is None else [first]
        while jobs and len(jobs) < self._most_at_once and not self._jobs.empty():
            job = self._jobs.get()
            if job is None:
                self._jobs.put(None)
                break
            jobs.append(job)
        return jobs


class Movers:
    """The threads of all directions, so that neither waits for the other: the link has both at once."""

    def __init__(
        self, copiers: Callable[[], Copier], region: HostRegion, disk: DiskFile | None, sealer: Sealer
    ) -> None:
        self._region = region
        self._disk = disk
        self._sealer = sealer
        self._down, self._up, self._up_from_disk = copiers(), copiers(), copiers()
        block_bytes = region.memory.block_bytes
        self._batch = max(1, _BATCH_BYTES // block_bytes)
        device = self._down.device
        self._buffer = Buffer(block_bytes, device) if disk is not None else None  # of loads
        self.demotions: Mover[Demotion] = Mover("demotions", device, self._demote, self._batch)
        self.loads: Mover[Load] = Mover("loads", device, self._load)
        self.writes: Mover[Write] = Mover("writes", device, self._write)
        self.disk_loads: Mover[Load] = Mover("disk-loads", device, self._load_from_disk)

    def start(self, load: Load) -> None:
        """Starts a load."""
        (self.loads if load.tier is KvTier.HOST else self.disk_loads).submit(load)

    def cancel(self, load: Load) -> None:
        """Ends a load. When this returns, nothing writes into its blocks any more; it takes two batches at most."""
        load.is_cancelled = True
        # A device that has failed raises RuntimeError, and writes nothing.
        with load.lock, suppress(RuntimeError):
            (self._up if load.tier is KvTier.HOST else self._up_from_disk).wait()

    def close(self) -> None:
        """Ends the threads."""
        for mover in (self.demotions, self.loads, self.writes, self.disk_loads):
            mover.close()
        if self._buffer is not None:
            self._buffer.close()

    def _demote(self, jobs: Sequence[Demotion]) -> None:
        """Copies blocks to host memory, and seals them. Reads the digest from the pool: it tells of a bad copy, too."""
        for job in jobs:
            if job.write is not None:
                self._spill(job.write)
            self._region.set_seal(job.slot, b"")
            self._down.copy_out(job.block, self._region.words[job.slot])
        digests = self._down.read(self._down.digest([job.block for job in jobs]))
        for job, digest in zip(jobs, digests, strict=True):
            self._region.set_seal(job.slot, self._sealer.seal(job.contents, digest))

    def _spill(self, write: Write) -> None:
        """Copies a block to its buffer, and lets it be written."""
        self._down.wait()
        try:
            write.buffer.words.copy_(self._region.words[write.spill.host_slot])
            write.buffer.set_seal(self._region.seal(write.spill.host_slot))
        except RuntimeError as error:
            write.failure = str(error)
        self.writes.submit(write)

    def _write(self, jobs: Sequence[Write]) -> None:
        assert self._disk is not None
        for job in jobs:
            if not job.failure:
                self._disk.write(job.spill.disk_slot, job.buffer)

    def _load(self, loads: Sequence[Load]) -> None:
        for load in loads:
            self._await_leaving(load)
            try:
                self._load_from_host(load)
            finally:
                self._up.wait()

    def _load_from_host(self, load: Load) -> None:
        """Copies batches, each while the one before is checked."""
        unchecked: tuple[Sequence[LoadItem], torch.Tensor] | None = None
        for start in range(0, len(load.items), self._batch):
            items = load.items[start : start + self._batch]
            with load.lock:
                if load.is_cancelled:
                    return
                for item in items:
                    self._up.copy_in(self._region.words[item.place.slot], item.block)
                digests = self._up.digest([item.block for item in items])
            if unchecked is not None and not self._check_host(load, *unchecked):
                return
            unchecked = items, digests
        if unchecked is not None and self._check_host(load, *unchecked):
            load.seconds = time.monotonic() - load.started

    def _check_host(self, load: Load, items: Sequence[LoadItem], digests: torch.Tensor) -> bool:
        seals = [self._region.seal(item.place.slot) for item in items]
        return self._check(load, items, seals, self._up.read(digests))

    def _await_leaving(self, load: Load) -> None:
        if not self.demotions.wait(load.after, _LEAVING_SECONDS):
            raise OSError("blocks are still on their way down")

    def _load_from_disk(self, loads: Sequence[Load]) -> None:
        for load in loads:
            self._await_leaving(load)
            for item in load.items:
                if not self._load_through_buffer(load, item):
                    return
            load.seconds = time.monotonic() - load.started

    def _load_through_buffer(self, load: Load, item: LoadItem) -> bool:
        assert self._disk is not None
        assert self._buffer is not None
        if item.place.tier is KvTier.DISK:
            self._disk.read(item.place.slot, self._buffer)
            row, seal = self._buffer.words, self._buffer.seal
        else:
            row, seal = self._region.words[item.place.slot], self._region.seal(item.place.slot)
        with load.lock:
            if load.is_cancelled:
                return False
            self._up_from_disk.copy_in(row, item.block)
            digests = self._up_from_disk.read(self._up_from_disk.digest([item.block]))
        return self._check(load, [item], [seal], digests)

    def _check(self, load: Load, items: Sequence[LoadItem], seals: Sequence[bytes], digests: Sequence[int]) -> bool:
        """Counts blocks that are what they should be; False, with the failure, at the first that is not.

        After `cancel` it counts no more: the engine's thread has read by then how many there are.
        """
        with load.lock:
            if load.is_cancelled:
                return False
            for item, seal, digest in zip(items, seals, digests, strict=True):
                try:
                    self._sealer.check(seal, item.contents, digest)
                except DamagedBlock as damage:
                    load.failure, load.is_damaged = f"{damage} of a block in {item.place.tier.name}", True
                    return False
                load.checked += 1
            return True
