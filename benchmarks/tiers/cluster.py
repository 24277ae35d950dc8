"""Four workers behind the router's policy, and what is measured of their requests."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import cluster_service_pb2, generate_pb2
from benchmarks.routing.simulated.clock import Time
from benchmarks.tiers.oracle import Returns
from benchmarks.tiers.worker import BLOCK_BYTES, BLOCK_TOKENS, Hardware, Job, Sizes, Worker, hash_of
from discovery.record import WorkerRecord
from router.routing.policy import Candidates, KnownLoras, PromptBlocks, RoutingRequest
from router.routing.prefix.cost import Priors
from router.routing.prefix.predicted import PredictedSeconds

WORKERS = 4
_MODEL, _PROMPT = "m", prompt_pb2.Prompt()


@dataclass(frozen=True)
class Policy:
    """The memory below the pool, as multiples of it, whether clients say that their sessions end, whether workers
    borrow from one another, and whether they know when each session returns.
    """

    name: str
    host: float = 0.0
    disk: float = 0.0
    ends: bool = False
    borrows: bool = False
    knows_returns: bool = False


POLICIES = (
    Policy("pool alone"),
    Policy("+ host", host=2),
    Policy("+ host, disk", host=2, disk=16),
    Policy("+ host, end", host=2, ends=True),
    Policy("+ host, end, disk", host=2, disk=16, ends=True),
    Policy("+ host, peer", host=2, borrows=True),
    Policy("+ host, end, peer", host=2, ends=True, borrows=True),
    Policy("+ twice the host, end, peer", host=4, ends=True, borrows=True),
    Policy("oracle", host=2, ends=True, knows_returns=True),
    Policy("oracle, peer", host=2, ends=True, borrows=True, knows_returns=True),
)
INFINITE = Policy("infinite")


class _View:
    """A worker as the policy sees it."""

    problem = embedding_layout = encoder = ""
    requests = waiting_tokens = others_tokens = 0
    wake_seconds = 0.0
    token_seconds = None
    loras = KnownLoras()

    def __init__(self, record: WorkerRecord, worker: Worker | None = None) -> None:
        self.record = record
        self.load = cluster_service_pb2.WorkerLoad()
        self.worker = worker


@dataclass
class Measured:
    """The requests after the warm-up, in blocks and seconds."""

    prompts: int = 0
    found: Counter[str] = field(default_factory=Counter)
    first_tokens: list[float] = field(default_factory=list)  # of follow-up turns

    @property
    def hit(self) -> float:
        """The share of prompts that was not computed."""
        return self.found.total() / max(1, self.prompts)

    def quantile(self, share: float) -> float:
        """Of the times to the first token."""
        times = sorted(self.first_tokens) or [0.0]
        return times[min(len(times) - 1, int(share * len(times)))]


class Cluster:
    """Places requests by the real policy; `measured` has those that came after `warm_seconds`."""

    def __init__(self, time: Time, policy: Policy, hardware: Hardware, pool_blocks: int, warm_seconds: float) -> None:
        self.time, self.policy, self._warm_seconds = time, policy, warm_seconds
        priors = Priors(
            prefill_base_seconds=0.0,
            prefill_tokens_per_second=hardware.tokens_per_second,
            load_base_seconds=0.0,
            host_bytes_per_second=hardware.host_bytes_per_second,
            disk_bytes_per_second=hardware.disk_read,
        )
        if policy.borrows:
            rate = hardware.peer_bytes_per_second
            priors = replace(priors, transfer_base_seconds=0.0, transfer_bytes_per_second=rate)
        self._router = PredictedSeconds(priors=priors, clock=time, seed=1, prefix_loans=policy.borrows)
        sizes = Sizes(pool_blocks, int(policy.host * pool_blocks), int(policy.disk * pool_blocks))
        self.returns = Returns()
        known = self.returns if policy.knows_returns else None
        self.workers = [Worker(f"p{n}", time, hardware, sizes, self._router.caches, known) for n in range(WORKERS)]
        decode = WorkerRecord("d", 1, "x:2", ("decode",), "m", "simulated", "a" * 64, 1 << 20)
        self._candidates = Candidates(
            (_View(decode),), tuple(_View(worker.record, worker) for worker in self.workers), requires_prefill=True
        )
        self.measured = Measured()
        self.live_blocks: list[int] = []  # samples of all sessions' blocks, once it has run
        self.refused = 0
        self._last_sent = 0.0

    def submit(
        self, session: str, blocks: Sequence[int], answered: Callable[[], None], *, follows: bool, output: float
    ) -> None:
        """Sends a prompt, unless no pool can hold it. `answered` is called after so many seconds of decoding."""
        if len(blocks) > self.workers[0].pool.total:
            self.refused += 1
            self.time.later(output, answered)
            return
        tokens = len(blocks) * BLOCK_TOKENS
        request = RoutingRequest(
            _MODEL,
            _PROMPT,
            generate_pb2.RoutingOptions(session_key=session),
            answer_tokens=1,
            blocks=PromptBlocks(list(blocks), BLOCK_TOKENS, BLOCK_BYTES),
            token_ids=range(tokens),
        )
        placement = self._router.choose(request, self._candidates)
        assert placement.prefill is not None
        assert placement.prefill.worker is not None
        sent = self._last_sent = self.time.now

        def computed(job: Job) -> None:
            placement.progress.first_token(job.found.total() * BLOCK_TOKENS)
            if job.loan_seconds:
                placement.progress.borrowed(job.found["peer"] * BLOCK_TOKENS, job.loan_seconds)
            placement.progress.close()
            if sent >= self._warm_seconds:
                self.measured.prompts += len(blocks)
                self.measured.found += job.found
                if follows:
                    self.measured.first_tokens.append(self.time.now - sent)
            self.time.later(output, answered)

        job = Job(session, [hash_of(each) for each in blocks], computed)
        if self.policy.knows_returns:
            self.returns.sent(session, job.hashes)
        if (prediction := placement.prediction) is not None and (peer := prediction.load.peer) is not None:
            [job.lender] = [worker for worker in self.workers if worker.record is peer.record]
            job.lent_blocks, job.patience_seconds = peer.num_blocks, peer.saved_seconds
        placement.prefill.worker.run(job)

    def end(self, session: str) -> None:
        """Ends a session, if the policy lets clients say so."""
        self.returns.ended(session)
        if self.policy.ends:
            for worker in self.workers:
                worker.end(session)

    @property
    def unread(self) -> float:
        """Of the blocks that were demoted, the share that was never read."""
        moved = sum((worker.moved for worker in self.workers), Counter())
        return 1 - moved["read"] / moved["demoted"] if moved["demoted"] else 0.0

    @property
    def busy(self) -> float:
        """The share of time in which workers computed, until the last request."""
        return sum(worker.busy_seconds for worker in self.workers) / WORKERS / self._last_sent
