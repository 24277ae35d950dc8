"""The core of the embedded engine by its own parts: scheduler, pool, tiers and their copies, journal, kept cache.

The model is a function of the ids before a token, the KV of a token is a number made of them, and the threads of the
tiers run when the world lets them.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from zlib import crc32

import torch

from services.engines.journal.slots import Slot, SlotShape
from services.engines.kv import KvLayout
from services.engines.memory.allocation import AllocationRules
from services.engines.pytorch import core as engine_core
from services.engines.pytorch import parts as engine_parts
from services.engines.pytorch.kv_cache.blocks import BlockPool
from services.engines.pytorch.kv_cache.kept_cache import KeptCache, KeptPool, KeptShape
from services.engines.pytorch.kv_cache.memory import HostMemory, anonymous_file
from services.engines.pytorch.kv_cache.tiers import moves
from services.engines.pytorch.kv_cache.tiers import tiers as tiers_module
from services.engines.pytorch.kv_cache.tiers.disk import Buffer, DiskFile
from services.engines.pytorch.kv_cache.tiers.host import Copier, words_of
from services.engines.pytorch.kv_cache.tiers.options import TierOptions
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.runners.runner import InflightStep
from services.engines.pytorch.sampling.sampling import Chosen
from services.engines.pytorch.sequence import TokenSequence
from services.engines.pytorch.steps.scheduler import SchedulerLimits
from services.engines.seals import SEAL_BYTES
from simulation.entropy import Time

BLOCK_TOKENS = 4
LAYOUT = KvLayout("ids", "float32", 1, 1, 1, BLOCK_TOKENS, 1, 4 * BLOCK_TOKENS)
VOCABULARY = 50
_SLOT = SlotShape(400, 120)
_SLOTS = 24


class Killed(BaseException):
    """The process has died here. What it wrote to kept memory stays."""


def kv_of(ids: Sequence[int]) -> list[int]:
    """The KV of each token: a number of all ids up to it, never 0."""
    found, value = [], 1
    for one in ids:
        value = crc32(one.to_bytes(4, "little"), value)
        found.append(value % 0x7FFF_FFFE + 1)
    return found


def next_id(kv: int) -> int:
    """The id that the model chooses after a token."""
    return kv % VOCABULARY


@dataclass
class SimulatedMover:
    """In the place of a thread of the tiers: it runs jobs when the world lets it, or somebody waits for them."""

    name: str
    device: Any
    run: Callable[[Sequence[Any]], None]
    most_at_once: int = 1
    jobs: deque[Any] = field(default_factory=deque)

    # Of the world: what happens while a load waits, and whether the next copy fails.
    between: ClassVar[Callable[[], None]]
    fails: ClassVar[Callable[[], bool]]
    is_loading: ClassVar[bool] = False

    def start(self) -> None:
        """It has no thread."""

    def submit(self, jobs: Sequence[Any]) -> None:
        self.jobs += jobs

    def wait(self, jobs: Sequence[Any], _seconds: float) -> bool:
        if SimulatedMover.is_loading:
            SimulatedMover.between()
        while not all(job.is_done for job in jobs):
            assert self.jobs, f"{self.name}: waits for a job that nobody has"
            self.run_next()
        return True

    def run_next(self) -> None:
        """Runs the next jobs, as the thread does."""
        jobs = [self.jobs.popleft() for _ in range(min(self.most_at_once, len(self.jobs)))]
        SimulatedMover.is_loading = "loads" in self.name
        try:
            self.run(jobs)
        except Exception as error:  # as the thread's own
            for job in jobs:
                job.failure = job.failure or str(error) or type(error).__name__
        finally:
            SimulatedMover.is_loading = False
        for job in jobs:
            job.is_done = True

    def end(self) -> None:
        self.jobs.clear()

    def has_ended(self, _seconds: float) -> bool:
        return True


class UnsureCopier(Copier):
    """Copies may fail."""

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if SimulatedMover.fails():
            raise RuntimeError("simulated")
        super()._copy(source, target)


class UnsureDisk(DiskFile):
    """Reads and writes may fail."""

    def write(self, slot: int, buffer: Buffer) -> None:
        if SimulatedMover.fails():
            raise OSError("simulated")
        super().write(slot, buffer)

    def read(self, slot: int, buffer: Buffer) -> None:
        if SimulatedMover.fails():
            raise OSError("simulated")
        super().read(slot, buffer)


class IdsRunner:
    """Steps of the model of ids. `check` gets each sequence whose KV a step reads, and how many tokens of it.

    A step is computed when it is started, or later, but before the next one, as a device does.
    """

    def __init__(
        self, words: torch.Tensor, check: Callable[[list[int], list[int], int], None], random: Any, token_seconds: float
    ) -> None:
        self._words, self._check, self._random, self._token_seconds = words, check, random, token_seconds
        self._flying: dict[TokenSequence, list[int]] = {}  # sampled, and not told yet
        self._waiting: deque[Callable[[], None]] = deque()

    def start(self, chunks: Sequence[Chunk]) -> InflightStep:
        if self._random.random() < 0.005:
            raise torch.OutOfMemoryError("simulated")
        self._compute()
        Time.now += self._token_seconds * sum(chunk.count for chunk in chunks)
        chosen: list[Chosen | None] = []
        for chunk in chunks:
            sequence = chunk.sequence
            ids = [*sequence.tokens, *self._flying.get(sequence, ())]
            assert len(ids) >= chunk.end
            kv = kv_of(ids)
            self._waiting.append(partial(self._compute_chunk, chunk.start, chunk.end, kv, list(sequence.blocks)))
            chosen.append(Chosen(next_id(kv[chunk.end - 1])) if chunk.samples else None)
            if chunk.samples:
                self._flying.setdefault(sequence, []).append(next_id(kv[chunk.end - 1]))
        if self._random.random() < 0.5:
            self._compute()
        return InflightStep(chunks, partial(self._outcomes, chunks, chosen), self._random.random() < 0.8)

    def prepare_more(self) -> bool:
        """Nothing is left to prepare."""
        return False

    def _outcomes(self, chunks: Sequence[Chunk], chosen: list[Chosen | None]) -> list[Chosen | None]:
        self._compute()
        for chunk in chunks:
            if chunk.samples:
                flying = self._flying[chunk.sequence]
                flying.pop(0)
                if not flying:
                    del self._flying[chunk.sequence]
        return chosen

    def _compute(self) -> None:
        while self._waiting:
            self._waiting.popleft()()

    def _compute_chunk(self, start: int, end: int, kv: list[int], blocks: list[int]) -> None:
        self._check(kv, blocks, start)
        for index in range(start, end):
            self._words[blocks[index // BLOCK_TOKENS], index % BLOCK_TOKENS] = kv[index]


class Keeper:
    """Kept memory, and the count of writes into it after which the process dies."""

    def __init__(self, blocks: int, epoch: bytes) -> None:
        self.shape = KeptShape(LAYOUT, blocks, _SLOT, _SLOTS)
        sizes = (blocks * LAYOUT.block_bytes, blocks * SEAL_BYTES, _SLOTS * _SLOT.num_bytes)
        self._files = [anonymous_file(size) for size in sizes]
        self._is_new = True
        self.writes_left = -1
        os.pwrite(self._files[1], epoch, 0)

    def pool(self) -> KeptPool:
        """For the next process."""
        pool, seals, journal = (os.dup(file) for file in self._files)
        is_found, self._is_new = not self._is_new, False
        return KeptPool(pool, seals, journal, self.shape.num_blocks, is_found)

    def damage(self, block: int) -> None:
        """Changes a token's KV in a block, if its seal can tell: what has none is its process's own until its end."""
        if any(os.pread(self._files[1], SEAL_BYTES, block * SEAL_BYTES)):
            os.pwrite(self._files[0], b"\xff", block * LAYOUT.block_bytes)

    def close(self) -> None:
        for file in self._files:
            os.close(file)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the writes of journal and seals. The last one may be torn."""
        put, write = Slot._put, KeptCache._write

        def put_counted(slot: Slot, at: int, data: bytes) -> None:
            put(slot, at, data[: self._whole(len(data))])
            self._die()

        def write_counted(cache: KeptCache, block: int, seal: bytes) -> None:
            start = block * SEAL_BYTES
            part = seal[: self._whole(len(seal))]
            cache._seals[start : start + len(part)] = part
            self._die()

        Slot._put, KeptCache._write = put_counted, write_counted  # type: ignore[method-assign]
        try:
            yield
        finally:
            Slot._put, KeptCache._write = put, write  # type: ignore[method-assign]

    def _whole(self, size: int) -> int:
        self.writes_left -= self.writes_left > 0
        return size if self.writes_left else size // 2

    def _die(self) -> None:
        if self.writes_left == 0:
            self.writes_left = -1
            raise Killed


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of an engine, drawn by the seed."""

    blocks: int
    step_tokens: int
    sequences: int
    held_share: float
    tiers: TierOptions | None


class Core(engine_core.EngineCore):
    """The product's core, without a warm-up and the facts of a model."""

    def _warm_up(self) -> None:
        """Nothing."""

    def _open_facts(self, *_: Any) -> None:
        """Nothing."""


def open_core(shape: Shape, keeper: Keeper | None, listener: Any, runner: Callable[[torch.Tensor], IdsRunner]) -> Core:
    """A process of the engine."""
    moves.Mover = SimulatedMover  # type: ignore[misc, assignment]
    tiers_module.Copier, tiers_module.DiskFile = UnsureCopier, UnsureDisk  # type: ignore[misc]
    moves._BATCH_BYTES = 2 * LAYOUT.block_bytes
    moves._DEMOTED = 1
    kept = keeper.pool() if keeper else None
    memory = HostMemory(LAYOUT, shape.blocks, kept.pool if kept else None)
    pool = BlockPool(shape.blocks, listener)
    recovered = engine_parts.Recovered()
    if keeper is not None:
        recovered = engine_parts._recover(pool, memory, keeper.shape, kept)
    limits = SchedulerLimits(shape.sequences, shape.step_tokens, 100, (shape.blocks - 1) * 4, BLOCK_TOKENS, True)
    tiers = tiers_module.KvTiers(shape.tiers, LAYOUT, memory.tensor, listener) if shape.tiers else None
    pool.lower = tiers
    model: Any = SimpleNamespace(module=None)
    made = engine_parts.EngineParts(
        model, None, LAYOUT, limits, memory, pool, tiers, None, runner(words_of(memory.tensor)), recovered, frozenset()
    )
    engine_core.open_parts = lambda *_: made
    config: Any = SimpleNamespace(speculation=None)
    return Core(config, listener, AllocationRules(shape.held_share, 0.5))
