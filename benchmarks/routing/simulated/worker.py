"""A worker in simulated time: its blocks, its steps, its load."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.inference.v1 import cluster_service_pb2
from benchmarks.routing.simulated.clock import StepCosts, Time
from discovery.record import WorkerRecord
from services.engines.simulated.blocks import Blocks

NO_LAYOUT = "0" * 64


@dataclass(eq=False)
class Job:
    """A prompt on a worker: `hashes` of its full blocks, and what is done of it."""

    tokens: int
    hashes: tuple[bytes, ...]
    output: int  # tokens to generate here; 0 where it is handed over
    computed_call: Callable[["Job"], None]
    finished_call: Callable[["Job"], None] | None = None
    arrived: bool = False  # its KV was pulled: nothing is to compute
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached_tokens: int = 0
    generated: int = 0
    answer_hashes: tuple[bytes, ...] = ()  # of the blocks that the answer fills, as the next turn has them


class SimulatedWorker:
    """One worker of one rank. Its steps are those of the simulated engine."""

    def __init__(self, time: Time, costs: StepCosts, worker_id: str, role: str) -> None:
        self.record = WorkerRecord(worker_id, 1, "x:1", (role,), "m", "simulated", NO_LAYOUT, 10**9)
        self.blocks = Blocks(costs.num_blocks, self)  # type: ignore[arg-type]  # a publisher in simulated time
        self.computed_tokens = 0
        self.listeners: list[Callable[[list[bytes], list[bytes]], None]] = []
        self._time, self._costs = time, costs
        self._waiting: deque[Job] = deque()
        self._claims: deque[tuple[Job, Callable[[Job], None]]] = deque()
        self._running: dict[Job, None] = {}
        self._is_stepping = False
        self._changes: dict[bytes, bool] = {}

    # As a KvPublisher:

    def stored(self, block_hash: bytes, rank: int) -> None:
        assert not rank
        self._changes[block_hash] = True

    def removed(self, block_hash: bytes, rank: int) -> None:
        assert not rank
        self._changes[block_hash] = False

    def load(self) -> cluster_service_pb2.WorkerLoad:
        waiting = sum(job.tokens for job in self._waiting) + sum(job.tokens - job.computed for job in self._running)
        return cluster_service_pb2.WorkerLoad(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._claims),
            waiting_prefill_tokens=waiting,
            blocks_total=self.blocks.total,
            blocks_used=self.blocks.used,
        )

    def enqueue(self, job: Job) -> None:
        self._waiting.append(job)
        self._step_if_idle()

    def reserve(self, job: Job, granted: Callable[[Job], None]) -> None:
        """Blocks for a pull; those that are cached count as computed."""
        self._claims.append((job, granted))
        self._grant()

    def start_pulled(self, job: Job) -> None:
        self._register(job, 0)
        self._running[job] = None
        self._step_if_idle()

    def release(self, job: Job) -> None:
        self.blocks.release(job.blocks)
        job.blocks = []
        self._grant()
        self._tell()
        self._step_if_idle()

    def _grant(self) -> None:
        while self._claims:
            job, granted = self._claims[0]
            if not self._take(job, len(job.hashes)):
                return
            self._claims.popleft()
            granted(job)

    def _take(self, job: Job, most_cached: int) -> bool:
        size = self._costs.block_tokens
        cached = self.blocks.match(job.hashes[:most_cached])
        missing = -(-(job.tokens + job.output) // size) - len(cached)
        taken = self.blocks.take(cached, missing)
        if taken is None:
            return False
        job.blocks, job.cached_tokens, job.computed = taken, len(cached) * size, len(cached) * size
        return True

    def _admit(self) -> None:
        size, chunk = self._costs.block_tokens, self._costs.chunk_blocks * self._costs.block_tokens
        while self._waiting and sum(job.tokens - job.computed for job in self._running) < chunk:
            if not self._take(self._waiting[0], (self._waiting[0].tokens - 1) // size):
                return
            self._running[self._waiting.popleft()] = None

    def _step_if_idle(self) -> None:
        if not self._is_stepping:
            self._is_stepping = True
            self._step()

    def _step(self) -> None:
        self._admit()
        budget, plan, decodes = self._costs.chunk_blocks * self._costs.block_tokens, [], False
        for job in self._running:
            missing = job.tokens - job.computed
            if not missing:
                decodes = True
                plan.append((job, 0))
            elif budget:
                count = min(missing, budget)
                budget -= count
                plan.append((job, count))
        if not plan:
            self._is_stepping = False
            return
        tokens = sum(count for _, count in plan)
        seconds = tokens / self._costs.tokens_per_second + (self._costs.step_seconds if decodes else 0.0)
        self.computed_tokens += tokens
        self._time.later(seconds, lambda: self._stepped(plan))

    def _stepped(self, plan: Sequence[tuple[Job, int]]) -> None:
        for job, count in plan:
            before = job.computed
            job.computed += count
            self._register(job, before)
            if job.computed < job.tokens:
                continue
            job.generated += 1
            if count:
                job.computed_call(job)
            if job.generated > job.output or not job.output:
                self._register_answer(job)
                del self._running[job]
                if job.finished_call:
                    self.release(job)
                    job.finished_call(job)
        self._tell()
        self._step()

    def _register(self, job: Job, before: int) -> None:
        size = self._costs.block_tokens
        for index in range(before // size, min(job.computed // size, len(job.hashes))):
            self.blocks.register(job.blocks[index], job.hashes[index])

    def _register_answer(self, job: Job) -> None:
        first, full = (
            job.tokens // self._costs.block_tokens,
            (job.tokens + job.generated - 1) // self._costs.block_tokens,
        )
        for block_id, block_hash in zip(job.blocks[first:full], job.answer_hashes, strict=False):
            self.blocks.register(block_id, block_hash)

    def _tell(self) -> None:
        if not self._changes or not self._costs.kv_events:
            self._changes.clear()
            return
        stored = [each for each, is_there in self._changes.items() if is_there]
        removed = [each for each, is_there in self._changes.items() if not is_there]
        self._changes.clear()
        for listener in self.listeners:
            self._time.later(self._costs.hop_seconds, lambda tell=listener: tell(stored, removed))  # type: ignore[misc]
