"""A prefill worker: a real block pool, order of admission, directory and rates, with simulated computing, host link and
disk.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.routing.simulated.clock import Time
from benchmarks.tiers.oracle import OracleDirectory, OracleOrder, Returns
from discovery.record import PREFIX_LOANS, WorkerRecord
from router.routing.prefix.prefix_caches import Cache, PrefixCaches
from services.engines.kv_events import KvTier
from services.engines.memory.allocation import LOOK_AHEAD, Grant, grant_blocks
from services.engines.prompt import Session
from services.engines.pytorch.kv_cache.blocks import BlockPool
from services.engines.pytorch.kv_cache.events import BlockMoved, BlockRemoved, BlockStored
from services.engines.pytorch.kv_cache.tiers.directory import Place, TierDirectory
from services.engines.pytorch.kv_cache.tiers.jobs import Rates

BLOCK_TOKENS = 512
BLOCK_BYTES = BLOCK_TOKENS * 128 * 1024
# Until a decode worker has read a prompt's KV.
_HANDOFF_SECONDS = 0.05
_DISK_QUEUE_SECONDS = 5.0


@dataclass(frozen=True)
class Hardware:
    """An 8B model on an H200-like worker: tokens and bytes a second, and the context that doubles a token's work."""

    tokens_per_second: float = 40_000.0
    host_bytes_per_second: float = 55e9
    disk_read: float = 1.6e9
    disk_write: float = 0.65e9
    peer_bytes_per_second: float = 11e9  # 100 Gbit/s Ethernet
    context_tokens: float = float("inf")

    def compute_seconds(self, tokens: int, before: int) -> float:
        """The time to compute so many tokens after others."""
        return tokens / self.tokens_per_second * (1 + (before + tokens / 2) / self.context_tokens)


@dataclass(frozen=True)
class Sizes:
    """Blocks of the pool, of host memory, and of the disk."""

    pool: int
    host: int = 0
    disk: int = 0


@dataclass(eq=False)
class Job:
    """A prompt, and where its blocks were found."""

    session: str
    hashes: Sequence[bytes]
    computed: Callable[["Job"], None]
    lender: "Worker | None" = None  # which the router has named, and how many blocks that is to have
    lent_blocks: int = 0
    loan_seconds: float = 0.0
    found: Counter[str] = field(default_factory=Counter)
    blocks: list[int] = field(default_factory=list)
    places: Sequence[Place] = ()
    passed: int = 0
    patience_seconds: float = 0.0
    reserves = False


class Worker:
    """Computes prompts one after the other, as the engine's steps do: what waits for that has no blocks yet, and finds
    what those before it have computed. Loads run beside. Tells the router's picture of its cache of every change.
    """

    def __init__(
        self,
        name: str,
        time: Time,
        hardware: Hardware,
        sizes: Sizes,
        caches: PrefixCaches,
        returns: Returns | None = None,
    ) -> None:
        self.record = WorkerRecord(
            name, 1, "x:1", ("prefill",), "m", "simulated", "a" * 64, 1 << 20, capabilities=(PREFIX_LOANS,)
        )
        self._time, self._hardware, self._caches = time, hardware, caches
        self._cache = Cache(self.record.process)
        self._caches.replace(self._cache, ())
        self.directory = (OracleDirectory if returns else TierDirectory)(sizes.host, sizes.disk, self._tell, time)
        self.pool = BlockPool(sizes.pool + 1, self._tell)
        if returns is not None:
            assert isinstance(self.directory, OracleDirectory)
            self.directory.returns = returns
            self.pool._idle = OracleOrder(self.pool, returns)
        self.pool.lower = self if sizes.host else None
        self.rates = Rates(BLOCK_BYTES, BLOCK_TOKENS)
        self.rates.loaded(KvTier.HOST, 100, 100 * BLOCK_BYTES / hardware.host_bytes_per_second)
        self.rates.loaded(KvTier.DISK, 100, 100 * BLOCK_BYTES / hardware.disk_read)
        self.rates.computed(4096, hardware.compute_seconds(4096, 0))
        self._link_at = self._disk_read_at = self._disk_write_at = 0.0
        self._nic_at = 0.0
        self._borrowing: deque[Job] = deque()  # loans that wait for memory
        self._waiting: deque[Job] = deque()  # the first ones, of which some may get blocks before others
        self._behind: deque[Job] = deque()
        self._ready: deque[Job] = deque()  # that have their blocks, and what is loaded
        self._is_computing = False
        self.busy_seconds = 0.0
        self.moved: Counter[str] = Counter()

    def demote(self, evicted: Sequence[tuple[int, bytes]]) -> list[bytes]:
        """Demotes as KvTiers does, with a disk that takes only what it can write soon."""
        return [block_hash for _, block_hash in evicted if not self._demote(block_hash)]

    def _demote(self, block_hash: bytes) -> bool:
        may_spill = self._disk_write_at - self._time.now < _DISK_QUEUE_SECONDS
        placed = self.directory.place(block_hash, may_spill=may_spill)
        if placed is None:
            return False
        self.moved["demoted"] += 1
        if placed.spill is not None:
            self.moved["written"] += 1
            start = max(self._disk_write_at, self._time.now)
            self._disk_write_at = start + BLOCK_BYTES / self._hardware.disk_write
        return True

    def stored(self, block_hash: bytes) -> None:
        """Stores as KvTiers does."""
        self.directory.drop(block_hash)

    def lose(self, hashes: Sequence[bytes]) -> int:
        """Loses as KvTiers does."""
        return sum(self.directory.lose(block_hash) for block_hash in hashes)

    def leave_first(self, hashes: Sequence[bytes]) -> None:
        """Lets them leave first, as KvTiers does."""
        self.directory.leave_first(hashes)

    def run(self, job: Job) -> None:
        """Borrows the beginning of a prompt, if it is to, once there is memory for it, and runs it."""
        if job.lender is None:
            self._enqueue(job)
            return
        self._borrowing.append(job)
        self._time.later(job.patience_seconds, partial(self._give_up, job))
        self._step()

    def _give_up(self, job: Job) -> None:
        if job in self._borrowing:
            self._borrowing.remove(job)
            self._enqueue(job)

    def _borrow(self, job: Job) -> Grant:
        """Takes the blocks of a loan, if there is memory for it, and pulls what the lender has of it."""
        lender, hashes = job.lender, job.hashes[: min(job.lent_blocks, len(job.hashes) - 1)]
        assert lender is not None
        cached = self.pool.match(hashes)
        missing = hashes[len(cached) :]
        if self.pool.available_beside(cached) < len(missing):
            return Grant.POOL_FULL
        self.pool.share(cached)
        own = cached + self.pool.allocate(len(missing))
        lent, loaded_at = lender.lend(missing) if missing else ([], 0.0)
        if not lent:
            self.pool.release(own)
            self._behind.append(job)
            return Grant.GRANTED
        seconds = len(lent) * BLOCK_BYTES / self._hardware.peer_bytes_per_second
        pulled_at = max(self._nic_at, lender._nic_at, loaded_at, self._time.now) + seconds
        self._nic_at = lender._nic_at = pulled_at
        self.moved["lent"] += len(lent)

        def pulled() -> None:
            lender.give_back(lent, missing[: len(lent)])
            for block, block_hash in zip(own, hashes[: len(cached) + len(lent)], strict=False):
                self.pool.store(block, block_hash)
            self.pool.release(own)
            job.found["peer"] = len(lent)
            self._enqueue(job)

        job.loan_seconds = pulled_at - self._time.now
        self._time.later(job.loan_seconds, pulled)
        return Grant.GRANTED

    def lend(self, hashes: Sequence[bytes]) -> tuple[list[int], float]:
        """Holds the first blocks of a chain, and copies of those in host memory; says when these are loaded."""
        cached = self.pool.match(hashes)
        self.pool.share(cached)
        host, _ = self.directory.following(hashes[len(cached) :])
        host = min(host, self.pool.available)
        if not host:
            return cached, self._time.now
        self.directory.touch(hashes[len(cached) : len(cached) + host])
        new = self.pool.allocate(host)
        self.moved["read"] += host
        self._link_at = max(self._link_at, self._time.now) + host * BLOCK_BYTES / self._hardware.host_bytes_per_second
        return cached + new, self._link_at

    def give_back(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Ends a loan of blocks with these names, and lets those run that have waited for memory."""
        self.pool.release(blocks)
        self.pool.lent(hashes)
        self._step()

    def _enqueue(self, job: Job) -> None:
        self._behind.append(job)
        self._step()

    def _step(self) -> None:
        """Gives blocks to loans, and to prompts while none is computed, and computes the next that has its blocks."""
        grant_blocks(self._borrowing, self._borrow)
        if not self._is_computing and not self._ready:
            self._admit()
        if not self._is_computing and self._ready:
            self._compute(self._ready.popleft())

    def _admit(self) -> None:
        """Gives blocks by the engine's own rules, which look no further than `LOOK_AHEAD`."""
        while True:
            while self._behind and len(self._waiting) < LOOK_AHEAD:
                self._waiting.append(self._behind.popleft())
            waited = len(self._waiting)
            grant_blocks(self._waiting, self._offer)
            if self._ready or len(self._waiting) == waited or not self._behind:
                return

    def _offer(self, job: Job) -> Grant:
        """Takes the blocks of a prompt, if there is memory for it, and loads what is worth it."""
        if self._ready:
            return Grant.LATER
        cached = self.pool.match(job.hashes[:-1])
        if self.pool.available_beside(cached) < len(job.hashes) - len(cached):
            return Grant.POOL_FULL
        rest = job.hashes[len(cached) : -1]
        loaded = self.rates.worth_loading(*self.directory.following(rest)) if rest else 0
        self.pool.share(cached)
        # Taken before the allocation evicts others into these tiers.
        job.places = [self.directory.take(block_hash) for block_hash in rest[:loaded]]
        job.blocks = cached + self.pool.allocate(len(job.hashes) - len(cached))
        job.found["peer"] = min(job.found["peer"], len(cached))
        job.found["device"] = len(cached) - job.found["peer"]
        self._load(job)
        return Grant.GRANTED

    def _load(self, job: Job) -> None:
        now, places = self._time.now, job.places
        from_disk = sum(place.tier is KvTier.DISK for place in places)
        job.found["host"], job.found["disk"] = len(places) - from_disk, from_disk
        self.moved["read"] += len(places)
        self.directory.write_rule.read(from_disk)
        loaded_at = now
        if from_disk:
            seconds = from_disk * BLOCK_BYTES / self._hardware.disk_read
            self._disk_read_at = loaded_at = max(self._disk_read_at, now) + seconds
        if places:
            seconds = len(places) * BLOCK_BYTES / self._hardware.host_bytes_per_second
            self._link_at = max(self._link_at, now) + seconds
            loaded_at = max(loaded_at, self._link_at)
        if loaded_at > now:
            self._time.later(loaded_at - now, partial(self._loaded, job))
        else:
            self._ready.append(job)

    def _loaded(self, job: Job) -> None:
        self._ready.append(job)
        self._step()

    def _compute(self, job: Job) -> None:
        have = job.found.total()
        seconds = self._hardware.compute_seconds((len(job.hashes) - have) * BLOCK_TOKENS, have * BLOCK_TOKENS)
        self.busy_seconds += seconds
        self._is_computing = True
        self._time.later(seconds, partial(self._finish, job))

    def _finish(self, job: Job) -> None:
        for place in job.places:
            self.directory.free(place)
        for block, block_hash in zip(job.blocks, job.hashes, strict=True):
            self.pool.store(block, block_hash)
        self._is_computing = False
        job.computed(job)
        self._time.later(_HANDOFF_SECONDS, partial(self._release, job))
        self._step()

    def _release(self, job: Job) -> None:
        self.pool.release(job.blocks)
        if job.session:
            self.pool.record(Session(job.session.encode()), job.hashes)
        self._step()

    def end(self, session: str) -> None:
        """Ends a session."""
        self.pool.end_session(session.encode())

    def _tell(self, event: BlockStored | BlockRemoved | BlockMoved) -> None:
        keys = [int.from_bytes(event.block_hash[:8], "little")]
        match event:
            case BlockStored():
                self._caches.store(self._cache, keys)
            case BlockRemoved():
                self._caches.remove(self._cache, keys)
            case BlockMoved(_, tier):
                self._caches.move(self._cache, keys, on_disk=tier is KvTier.DISK)


def hash_of(number: int) -> bytes:
    """The hash of a block of a simulated prompt, given by its number."""
    return number.to_bytes(8, "little") * 2
