"""A router in simulated time: places requests by a policy, and takes them from worker to worker."""

from collections.abc import Callable, Mapping, Sequence

from baton.inference.v1 import generate_pb2, timing_pb2
from benchmarks.routing.comparison import Answer, Plan
from benchmarks.routing.simulated.clock import StepCosts, Time
from benchmarks.routing.simulated.prompts import prompt_of, shortened
from benchmarks.routing.simulated.worker import Job, SimulatedWorker
from devtools.bench.traces import TracedRequest
from router.routing.policy import Candidates, KnownLoras, Placement, Policy, PromptBlocks, RoutingRequest
from router.routing.prefix.kv_index import block_keys
from router.routing.prefix.predicted import PredictedSeconds
from router.routing.prefix.prefix_caches import Cache
from router.workers.watching.report_stream import CorrectedLoad


class View:
    """A worker as one router sees it; the arithmetic is that of `WorkerHandle`."""

    problem = embedding_layout = encoder = ""
    token_seconds: float | None = None

    def __init__(self, worker: SimulatedWorker) -> None:
        self.record = worker.record
        self.worker = worker
        self.load = worker.load()
        self.own_requests, self.own_tokens = CorrectedLoad(), CorrectedLoad()
        self.others_tokens = self._others_tokens_at_load = 0
        self.wake_seconds = 0.0

    @property
    def requests(self) -> int:
        return self.own_requests.value

    @property
    def waiting_tokens(self) -> int:
        return self.own_tokens.value

    @property
    def loras(self) -> KnownLoras:
        """It serves no adapters."""
        return KnownLoras()

    def report(self) -> None:
        self.load = self.worker.load()
        self.own_requests.reported(self.load.running + self.load.waiting)
        self.own_tokens.reported(self.load.waiting_prefill_tokens)
        before, self._others_tokens_at_load = self._others_tokens_at_load, max(0, self.own_tokens.elsewhere)
        self.others_tokens = min(before, self._others_tokens_at_load)


class SimulatedRouter:
    """RankCosts requests by a policy, and follows the workers."""

    def __init__(
        self,
        time: Time,
        plan: Plan,
        costs: StepCosts,
        policy: Policy,
        workers: Sequence[SimulatedWorker],
        answers: Mapping[TracedRequest, tuple[bytes, ...]] | None = None,
    ) -> None:
        self._time, self._plan, self._costs, self.policy = time, plan, costs, policy
        self.views = [View(worker) for worker in workers]
        self._prefill = [view for view in self.views if view.record.roles == ("prefill",)]
        self._decode = [view for view in self.views if view.record.roles == ("decode",)]
        self.answers: list[Answer] = []
        self.answered: Callable[[], None] = lambda: None  # called after each answer
        self._answers = answers or {}
        self.unfinished = 0
        if isinstance(policy, PredictedSeconds) and costs.kv_events:
            for worker in workers:
                self._subscribe(worker, policy)

    def watch(self, until: float) -> None:
        """Reads the workers' loads from now on."""
        for view in self.views:
            view.report()
        if self._time.now < until or self.unfinished:
            self._time.later(self._costs.load_interval_seconds, lambda: self.watch(until))

    def place(self, traced: TracedRequest) -> None:
        """Sends a request on its way."""
        tokens, hashes, keys = shortened(traced, self._costs.block_tokens)
        output = self._plan.answer_tokens(traced)
        request = RoutingRequest(
            "m",
            prompt_of(tokens),
            generate_pb2.RoutingOptions(),
            answer_tokens=output,
            blocks=PromptBlocks(keys, self._costs.block_tokens, self._costs.block_bytes),
        )
        placement = self.policy.choose(request, Candidates(self._decode, self._prefill))
        self.unfinished += 1
        job = Job(tokens, hashes, output, lambda job: None, answer_hashes=self._answers.get(traced, ()))
        _Run(self, self._time, self._costs, placement, job).start()

    def _subscribe(self, worker: SimulatedWorker, policy: PredictedSeconds) -> None:
        cache = Cache(worker.record.process, 0)
        policy.caches.replace(cache, block_keys(()))

        def tell(stored: list[bytes], removed: list[bytes]) -> None:
            policy.caches.remove(cache, block_keys(removed))
            policy.caches.store(cache, block_keys(stored))

        worker.listeners.append(tell)


class _Run:
    """One request on its workers."""

    def __init__(
        self, router: SimulatedRouter, time: Time, costs: StepCosts, placement: Placement[View], job: Job
    ) -> None:
        self._router, self._time, self._costs, self._placement, self._job = router, time, costs, placement, job
        self._runs_on = placement.prefill or placement.decode
        self._begun = time.now
        self._ttft = 0.0
        self._cached = 0

    def start(self) -> None:
        job = self._job
        self._send(self._runs_on, job.tokens)
        if self._placement.prefill is None:
            here = Job(job.tokens, job.hashes, job.output, self._got_first_token, self._finished)
            here.answer_hashes = job.answer_hashes
        else:
            here = Job(job.tokens, job.hashes, 0, self._prefilled)
        self._time.later(self._costs.hop_seconds, lambda: self._runs_on.worker.enqueue(here))

    def _send(self, view: View, tokens: int) -> None:
        view.own_requests.add(1)
        view.own_tokens.add(tokens)

    def _end(self, view: View, tokens: int) -> None:
        view.own_requests.remove(1)
        view.own_tokens.remove(tokens)

    def _got_first_token(self, here: Job) -> None:
        def heard() -> None:
            is_local = self._placement.prefill is None
            self._placement.progress.first_token(None if is_local else here.cached_tokens)
            self._ttft, self._cached = self._time.now - self._begun, here.cached_tokens

        self._time.later(self._costs.hop_seconds, heard)

    def _prefilled(self, here: Job) -> None:
        self._got_first_token(here)

        def decode() -> None:
            reader = self._placement.decode
            self._end(self._runs_on, here.tokens)
            self._send(reader, 0)
            there = Job(here.tokens, here.hashes, self._job.output, lambda job: None, self._finished)
            there.answer_hashes = self._job.answer_hashes
            asked = self._time.now

            def granted(job: Job) -> None:
                waited, blocks = self._time.now - asked, len(job.blocks) - job.cached_tokens // self._costs.block_tokens
                moved = blocks * self._costs.block_bytes
                seconds = self._costs.move_seconds + moved / self._costs.bytes_per_second
                self._time.later(seconds, lambda: arrived(job, waited, seconds, moved))

            def arrived(job: Job, waited: float, seconds: float, moved: int) -> None:
                self._runs_on.worker.release(here)
                job.computed, job.generated = job.tokens, 1
                reader.worker.start_pulled(job)
                self._placement.progress.accepted(_timings(waited, seconds, moved))

            self._time.later(self._costs.hop_seconds, lambda: reader.worker.reserve(there, granted))

        self._time.later(self._costs.hop_seconds, decode)

    def _finished(self, there: Job) -> None:
        def heard() -> None:
            is_local = self._placement.prefill is None
            if is_local:
                self._placement.progress.found_cached(there.cached_tokens)
            self._end(self._placement.decode, there.tokens if is_local else 0)
            self._placement.progress.close()
            self._router.unfinished -= 1
            self._router.answers.append(self._answer(is_local))
            self._router.answered()

        self._time.later(self._costs.hop_seconds, heard)

    def _answer(self, is_local: bool) -> Answer:
        job, prediction = self._job, self._placement.prediction
        return Answer(
            ttft=self._ttft,
            seconds=self._time.now - self._begun,
            tokens=job.tokens,
            cached=self._cached,
            output=job.output + 1,
            worker_id=self._runs_on.record.worker_id,
            is_local=is_local,
            predicted=prediction.first_token if prediction else 0.0,
        )


def _timings(waited: float, seconds: float, num_bytes: int) -> list[timing_pb2.StageTiming]:
    wait = timing_pb2.StageTiming(stage=timing_pb2.STAGE_HANDOFF_WAIT)
    wait.duration.FromNanoseconds(int(waited * 1e9))
    move = timing_pb2.StageTiming(stage=timing_pb2.STAGE_HANDOFF_TRANSFER, num_bytes=num_bytes)
    move.duration.FromNanoseconds(int(seconds * 1e9))
    return [wait, move]
