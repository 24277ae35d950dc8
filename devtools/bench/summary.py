"""The summary of the answers of one step of a benchmark."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from devtools.bench.load import Measured


@dataclass(frozen=True, slots=True)
class Targets:
    """The times that make an answer good; 0 for no target."""

    first_token_seconds: float = 0.0
    token_seconds: float = 0.0

    def meets(self, answer: Measured) -> bool:
        """True if an answer succeeded within the targets."""
        return (
            not answer.error
            and (not self.first_token_seconds or answer.first_token_seconds <= self.first_token_seconds)
            and (not self.token_seconds or answer.token_seconds <= self.token_seconds)
        )


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of times in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles":
        """The percentiles of some times; all 0 without any."""
        if len(seconds) < 2:
            only = seconds[0] if seconds else 0.0
            return cls(only, only, only)
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        return cls(cuts[49], cuts[89], cuts[98])


@dataclass(frozen=True, slots=True)
class Summary:
    """One step: all requests of a rate, a concurrency or a trace. Rates are per second from the first to the last."""

    step: str
    requests: int
    failed: int
    short: int  # good answers with fewer tokens than were asked for
    errors: dict[str, int]
    seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    first_token: Percentiles
    token: Percentiles
    whole: Percentiles
    goodput: float  # good answers a second
    good_share: float
    hit_rate: float  # cached of all prompt tokens
    busiest: float  # prompt tokens computed by the busiest worker, over the mean of the workers that ran any


def summarize(step: str, answers: Sequence[Measured], targets: Targets) -> Summary:
    """The summary of all answers of a step."""
    good = [answer for answer in answers if not answer.error]
    seconds = max((answer.at_seconds + answer.seconds for answer in answers), default=0.0)
    work: Counter[str] = Counter()
    for answer in good:
        work[answer.worker_id] += answer.prompt_tokens - answer.cached_tokens
    meeting = sum(targets.meets(answer) for answer in answers)
    return Summary(
        step=step,
        requests=len(answers),
        failed=len(answers) - len(good),
        short=sum(answer.output_tokens < answer.asked_tokens for answer in good),
        errors=dict(Counter(answer.error for answer in answers if answer.error)),
        seconds=seconds,
        requests_per_second=len(good) / seconds if seconds else 0.0,
        output_tokens_per_second=sum(answer.output_tokens for answer in good) / seconds if seconds else 0.0,
        first_token=Percentiles.of([answer.first_token_seconds for answer in good]),
        token=Percentiles.of([answer.token_seconds for answer in good if answer.output_tokens > 1]),
        whole=Percentiles.of([answer.seconds for answer in good]),
        goodput=meeting / seconds if seconds else 0.0,
        good_share=meeting / max(1, len(answers)),
        hit_rate=sum(answer.cached_tokens for answer in good) / max(1, sum(answer.prompt_tokens for answer in good)),
        busiest=max(work.values(), default=0) * len(work) / max(1, work.total()),
    )
