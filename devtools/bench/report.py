"""The summaries of a benchmark as Markdown, JSON and a plot. The summary of the answers of one step of a benchmark."""

import importlib
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
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


_COLUMNS = (
    "step | requests | failed | requests/s | output tokens/s | TTFT p50 | p90 | p99 | ITL p50 | p90 | p99"
    " | goodput/s | good | hit rate | busiest / mean"
)


def markdown(title: str, summaries: Sequence[Summary], targets: Targets) -> str:
    """A table with a row for each step. Times are in milliseconds."""
    lines = [f"# {title}", "", f"Times in ms. {_targets(targets)}", "", f"| {_COLUMNS} |"]
    lines.append("|" + "---|" * (_COLUMNS.count("|") + 1))
    lines += [f"| {' | '.join(_cells(each))} |" for each in summaries]
    lines += ["", *(f"{each.step} failed: {each.errors}" for each in summaries if each.failed)]
    lines += [f"{each.step}: {each.short} answers have fewer tokens than asked" for each in summaries if each.short]
    return "\n".join(lines).rstrip() + "\n"


def as_json(title: str, summaries: Sequence[Summary], targets: Targets) -> str:
    """All numbers, with times in seconds."""
    whole = {"title": title, "targets": asdict(targets), "steps": [asdict(each) for each in summaries]}
    return json.dumps(whole, indent=2) + "\n"


def check_plot(path: Path) -> None:
    """Raises ConfigError if there is no matplotlib to plot with, or if it cannot draw files named like `path`."""
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ImportError as error:
        raise ConfigError("--plot: needs matplotlib; install it with `pip install 'baton-serving[bench]'`") from error
    canvas = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    kind = path.suffix.removeprefix(".").lower()
    if kind and kind not in canvas.get_supported_filetypes():
        raise ConfigError(
            f"--plot: matplotlib cannot write {path}: name a file that ends in .png, .pdf or .svg, for example"
        )


def plot(path: Path, title: str, summaries: Sequence[Summary]) -> None:
    """Draws time to first token and throughput by step. Raises ConfigError if it cannot."""
    check_plot(path)
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots(2, 1, sharex=True, figsize=(8, 7))
    steps = [each.step for each in summaries]
    for name in ("p50", "p90", "p99"):
        axes[0].plot(steps, [getattr(each.first_token, name) * 1e3 for each in summaries], marker="o", label=name)
    axes[0].set(title=title, ylabel="time to first token, ms")
    axes[1].plot(steps, [each.requests_per_second for each in summaries], marker="o", label="answered")
    axes[1].plot(steps, [each.goodput for each in summaries], marker="o", label="within the targets")
    axes[1].set(xlabel="step", ylabel="requests a second")
    for each in axes:
        each.legend()
    save_plot(figure, path)


def save_plot(figure: Any, path: Path) -> None:
    """Writes matplotlib's figure. Raises ConfigError if it cannot."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error.strerror or error}") from error


def _targets(targets: Targets) -> str:
    parts = []
    if targets.first_token_seconds:
        parts.append(f"the first token within {targets.first_token_seconds * 1e3:g} ms")
    if targets.token_seconds:
        parts.append(f"{targets.token_seconds * 1e3:g} ms a token on average")
    return f"Good answers: {' and '.join(parts)}." if parts else "No targets: every answer is good."


def _cells(summary: Summary) -> list[str]:
    times = [
        f"{seconds * 1e3:.1f}"
        for percentiles in (summary.first_token, summary.token)
        for seconds in (percentiles.p50, percentiles.p90, percentiles.p99)
    ]
    return [
        summary.step,
        str(summary.requests),
        str(summary.failed),
        f"{summary.requests_per_second:.2f}",
        f"{summary.output_tokens_per_second:.1f}",
        *times,
        f"{summary.goodput:.2f}",
        f"{summary.good_share:.0%}",
        f"{summary.hit_rate:.3f}",
        f"{summary.busiest:.2f}",
    ]
