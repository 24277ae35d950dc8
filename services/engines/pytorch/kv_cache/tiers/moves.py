"""Demotions, spills and loads, each direction on a thread of its own."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import structlog

from services.engines.kv_events import KvTier
from services.engines.pytorch.kv_cache.digester import Digests
from services.engines.pytorch.kv_cache.tiers.disk import Buffers, DiskFile
from services.engines.pytorch.kv_cache.tiers.host import Copier, HostRegion
from services.engines.pytorch.kv_cache.tiers.jobs import Demotion, Load, LoadItem, Write
from services.engines.pytorch.kv_cache.tiers.mover import Mover
from services.engines.seals import DamagedBlock, Sealer

log = structlog.get_logger(__name__)

# So much is copied before its digests are read: long enough to hide what starting a copy takes.
_BATCH_BYTES = 32 << 20
# So many batches are on their way before the first of them must have been checked, or sealed.
_UNCHECKED = 3
# So many batches of demotions are one job of their thread.
_DEMOTED = 4
# The longest wait of a load for blocks that are still on their way down.
_LEAVING_SECONDS = 10.0
# The longest wait for the threads to end; a read or a write of a disk that hangs never does.
_CLOSE_SECONDS = 10.0


class Movers:
    """The threads of all directions, so that neither waits for the other: the link has both at once.

    None runs before `start`.
    """

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
        self._buffers = Buffers(block_bytes, 1, device) if disk is not None else None  # of loads
        self.demotions: Mover[Demotion] = Mover("demotions", device, self._demote, _DEMOTED * self._batch)
        self.loads: Mover[Load] = Mover("loads", device, self._load)
        self.writes: Mover[Write] = Mover("writes", device, self._write)
        self.disk_loads: Mover[Load] = Mover("disk-loads", device, self._load_from_disk)
        self._threads = self.demotions, self.loads, self.writes, self.disk_loads
        self._is_closed = False

    def start(self) -> None:
        """Starts the threads; ends them if one cannot be started."""
        try:
            for mover in self._threads:
                mover.start()
        except RuntimeError:
            self.close()
            raise

    def begin(self, load: Load) -> None:
        """Starts a load."""
        (self.loads if load.tier is KvTier.HOST else self.disk_loads).submit([load])

    def cancel(self, load: Load) -> None:
        """Ends a load. When this returns, nothing writes into its blocks any more; it takes a few batches at most."""
        load.is_cancelled = True
        # A device that has failed raises RuntimeError, and writes nothing.
        with load.lock, suppress(RuntimeError):
            (self._up if load.tier is KvTier.HOST else self._up_from_disk).wait()

    def close(self) -> bool:
        """Ends the threads. False if one of them hangs: what it may still use must then stay as it is."""
        self._is_closed = True
        for mover in self._threads:
            mover.end()
        late_at = time.monotonic() + _CLOSE_SECONDS
        hung = [mover.name for mover in self._threads if not mover.has_ended(max(0.0, late_at - time.monotonic()))]
        if hung:
            log.error("kv tier threads hang; their memory and file are left open", threads=hung, seconds=_CLOSE_SECONDS)
        elif self._buffers is not None:
            self._buffers.close()
        return not hung

    def _demote(self, jobs: Sequence[Demotion]) -> None:
        unwritten = deque(job.write for job in jobs if job.write is not None)
        try:
            for group in _independent(jobs):
                self._spill(unwritten, sum(job.write is not None for job in group))
                try:
                    self._copy_out(group)
                except RuntimeError as error:
                    for job in group:
                        job.failure = str(error)
        finally:
            # One that is not submitted would never end, whatever has failed here.
            for write in unwritten:
                write.failure = "it was not copied"
                self.writes.submit([write])

    def _copy_out(self, jobs: Sequence[Demotion]) -> None:
        """Copies blocks to host memory, and seals them. Reads the digest from the pool: it tells of a bad copy, too."""
        unsealed: deque[tuple[Sequence[Demotion], Digests]] = deque()
        for start in range(0, len(jobs), self._batch):
            batch = jobs[start : start + self._batch]
            for job in batch:
                self._region.set_seal(job.slot, b"")
            blocks = [job.block for job in batch]
            self._down.copy_out(blocks, [self._region.words[job.slot] for job in batch])
            unsealed.append((batch, self._down.digest(blocks)))
            if len(unsealed) == _UNCHECKED:
                self._seal(*unsealed.popleft())
        for batch, digests in unsealed:
            self._seal(batch, digests)

    def _seal(self, jobs: Sequence[Demotion], digests: Digests) -> None:
        for job, digest in zip(jobs, digests.read(), strict=True):
            self._region.set_seal(job.slot, self._sealer.seal(job.contents, digest))

    def _spill(self, writes: deque[Write], count: int) -> None:
        """Copies so many blocks to their buffers, and lets each be written. Removes those from `writes`."""
        for _ in range(count):
            write = writes[0]
            try:
                self._down.wait()
                write.buffer.words.copy_(self._region.words[write.spill.host_slot])
                write.buffer.set_seal(self._region.seal(write.spill.host_slot))
            except RuntimeError as error:
                write.failure = str(error)
            self.writes.submit([writes.popleft()])

    def _write(self, jobs: Sequence[Write]) -> None:
        assert self._disk is not None
        for job in jobs:
            if not job.failure:
                self._disk.write(job.spill.disk_slot, job.buffer)

    def _load(self, loads: Sequence[Load]) -> None:
        for load in loads:
            try:
                self._load_from_host(load)
            finally:
                self._up.wait()

    def _load_from_host(self, load: Load) -> None:
        """Copies batches, each while the ones before are checked."""
        unchecked: deque[tuple[Sequence[LoadItem], Digests]] = deque()
        for start in range(0, len(load.items), self._batch):
            items = load.items[start : start + self._batch]
            self._await_leaving(items)
            with load.lock:
                if load.is_cancelled or self._is_closed:
                    return
                blocks = [item.block for item in items]
                self._up.copy_in([self._region.words[item.place.slot] for item in items], blocks)
                digests = self._up.digest(blocks)
            unchecked.append((items, digests))
            if len(unchecked) == _UNCHECKED and not self._check_host(load, *unchecked.popleft()):
                return
        if all(self._check_host(load, *each) for each in unchecked):
            load.seconds = time.monotonic() - load.started

    def _check_host(self, load: Load, items: Sequence[LoadItem], digests: Digests) -> bool:
        seals = [self._region.seal(item.place.slot) for item in items]
        return self._check(load, items, seals, digests.read())

    def _await_leaving(self, items: Sequence[LoadItem]) -> None:
        """Waits for what must have left the slots and the blocks of the pool."""
        if not self.demotions.wait([job for item in items for job in item.after], _LEAVING_SECONDS):
            raise OSError("blocks are still on their way down")

    def _load_from_disk(self, loads: Sequence[Load]) -> None:
        for load in loads:
            self._await_leaving(load.items)
            for item in load.items:
                if not self._load_through_buffer(load, item):
                    return
            load.seconds = time.monotonic() - load.started

    def _load_through_buffer(self, load: Load, item: LoadItem) -> bool:
        assert self._disk is not None
        assert self._buffers is not None
        if item.place.tier is KvTier.DISK:
            [buffer] = self._buffers.buffers
            self._disk.read(item.place.slot, buffer)
            row, seal = buffer.words, buffer.seal
        else:
            row, seal = self._region.words[item.place.slot], self._region.seal(item.place.slot)
        with load.lock:
            if load.is_cancelled or self._is_closed:
                return False
            self._up_from_disk.copy_in([row], [item.block])
            digests = self._up_from_disk.digest([item.block]).read()
        return self._check(load, [item], [seal], digests)

    def _check(self, load: Load, items: Sequence[LoadItem], seals: Sequence[bytes], digests: Sequence[int]) -> bool:
        """Counts blocks that are what they should be; False, with the failure, at the first that is not.

        After `cancel` it counts no more: the engine's thread has read by then how many there are.
        """
        with load.lock:
            if load.is_cancelled or self._is_closed:
                return False
            for item, seal, digest in zip(items, seals, digests, strict=True):
                try:
                    self._sealer.check(seal, item.contents, digest)
                except DamagedBlock as damage:
                    load.failure, load.is_damaged = f"{damage} of a block in {item.place.tier.name}", True
                    return False
                load.checked += 1
            return True


def _independent(jobs: Sequence[Demotion]) -> Iterator[Sequence[Demotion]]:
    """Yields demotions in groups, none of which spills a block that another of the group brings: it has no seal yet."""
    group: list[Demotion] = []
    brought: set[int] = set()
    for job in jobs:
        if job.write is not None and job.write.spill.host_slot in brought:
            yield group
            group, brought = [], set()
        group.append(job)
        brought.add(job.slot)
    yield group
