"""Predicts how long a request would take, from the recent speed and the load of the workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from discovery.record import WorkerRecord
from router.routing.latency import Average, Clock, WorkerLatency
from runtime.clock import monotonic


class MeasuredWorker(Protocol):
    """A worker as the predictor sees it."""

    record: WorkerRecord
    latency: WorkerLatency
    wake_seconds: float

    @property
    def problem(self) -> str:
        """The reason that it cannot be used now; empty if it is ready."""


class Fleet(Protocol):
    """The workers of a cluster."""

    @property
    def workers(self) -> Sequence[MeasuredWorker]:
        """All of them, ready or not."""


@dataclass(frozen=True, slots=True)
class RequestEstimate:
    """The size of a request. `max_tokens` is None if only the model ends the answer. Workers of `role` complete it.

    With `is_part` it is one more answer to a request, whose tenant is charged by the whole.
    """

    model: str
    prompt_tokens: int
    max_tokens: int | None
    role: str = "decode"
    is_part: bool = False


class _Lengths:
    """The lengths of one model's answers."""

    def __init__(self, clock: Clock) -> None:
        self._share = Average(clock=clock)  # of max_tokens that is used
        self._length = Average(clock=clock)  # of those without max_tokens

    @property
    def is_known(self) -> bool:
        """True if there are recent measurements."""
        return self._share.value is not None or self._length.value is not None

    def tokens(self, max_tokens: int | None) -> float:
        """The expected length of an answer."""
        if max_tokens is None:
            return self._length.value or 1.0
        return max_tokens * (self._share.value or 0.0)

    def learn(self, max_tokens: int | None, generated: int) -> None:
        """Adds the length of a complete answer."""
        if max_tokens is None:
            self._length.add(generated)
        else:
            self._share.add(generated / max(1, max_tokens))


class LatencyPredictor:
    """Predicts from the measurements of the last seconds only. Without them requests are admitted, and measured."""

    def __init__(self, fleet: Fleet, clock: Clock = monotonic) -> None:
        self._fleet = fleet
        self._clock = clock
        self._lengths: dict[str, _Lengths] = {}  # by model

    def seconds(self, estimate: RequestEstimate) -> float | None:
        """The time from now to the last token on the quickest workers; None if unknown.

        If all of them sleep it is at least the time in which one wakes.
        """
        workers = [
            worker
            for worker in self._fleet.workers
            if worker.record.model == estimate.model and not worker.problem and not worker.record.draining
        ]
        decode = [worker for worker in workers if "decode" in worker.record.roles]
        prefill = [worker for worker in workers if "prefill" in worker.record.roles] or decode
        prompt = _least([worker.latency.prompts.seconds(estimate.prompt_tokens) for worker in prefill])
        tokens = _least([_token_seconds(worker, self._tokens(estimate)) for worker in decode])
        # Those that sleep have not been measured for long.
        waking = min((worker.wake_seconds for worker in decode), default=0.0)
        return waking or None if prompt is None or tokens is None else waking + prompt + tokens

    def learn(self, estimate: RequestEstimate, generated: int) -> None:
        """Adds a complete request."""
        lengths = self._lengths.get(estimate.model)
        if lengths is None:
            # Models come and go: do not keep outdated lengths.
            self._lengths = {model: kept for model, kept in self._lengths.items() if kept.is_known}
            lengths = self._lengths[estimate.model] = _Lengths(self._clock)
        lengths.learn(estimate.max_tokens, generated)

    def _tokens(self, estimate: RequestEstimate) -> float:
        lengths = self._lengths.get(estimate.model) or _Lengths(self._clock)
        return lengths.tokens(estimate.max_tokens)


def _least(seconds: Sequence[float | None]) -> float | None:
    """The least; None if there is none, or one is unknown: a worker without measurements may be quick."""
    known = [each for each in seconds if each is not None]
    return min(known) if known and len(known) == len(seconds) else None


def _token_seconds(worker: MeasuredWorker, tokens: float) -> float | None:
    step = worker.latency.token_seconds.value
    return None if step is None else (worker.latency.entry_seconds.value or 0.0) + tokens * step
