"""Measured results, as Markdown: the machine, the CPU, the latencies, and the bars that Baton is held to."""

import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.peers.clients.load import HALF, PACED
from benchmarks.peers.measure import LaterTokens, LoadPlan, Measured, Sample, Spread
from benchmarks.peers.plot import bars

_COMPARABLE = """\
CPU is user and system time of the router's processes. A token's rows have the whole cost of its request in them,
and 128 tokens carry one (64 at half the pace); `running` is a token's while all streams run, and none begins or
ends. Ratios are medians of the rounds' ratios to the first row, other figures medians of the rounds.

- Baton tokenizes (one token a byte), prefills and decodes on different workers, detokenizes, checks admission,
  keeps metrics and traces a tenth of the requests. Its workers are `server: http2`.
- vllm-router, sglang-router and smg relay the bytes of an HTTP engine whose answers are ready-made, and do not
  tokenize. `smg (gRPC)` tokenizes (one token a byte), prefills and decodes by its protocol for vLLM's engine, and
  detokenizes; its workers have ready-made answers, too, and `grpc.aio`.
- Dynamo tokenizes, prefills, decodes and detokenizes, before its own mocker. That has the pace of the other
  engines, but its own way to it: the CPU can be compared, the TTFT cannot, since the mocker's first token takes
  steps of its own.
- Flat out every engine goes as fast as it can, and no two go equally fast: read `tokens a message` with those rows.
- Baton's client comes over 8 connections where nothing else is said; over HTTP/1.1 each stream has a connection.
  All are kept alive. Envoy has one thread, before one router.

The streams of a load start within one second, or, flat out, all at once. For 1,024 that is more than an engine of
one core takes: their first tokens and their first intervals, 1 to 2 % of all, are those of a queue. `steady` is what
half the load means: as many streams, which start one after another over the length of a stream, and as each ends
another begins. Its latencies are those of the time in which all run, so that a request begins every 4 ms; its CPU is
that of the whole load, with the time before and after in which fewer run.

TTFT is from the request to the first token. ITL is the interval between two arrivals of tokens of one stream, and
jitter its standard deviation. `after step` is from the end of the engine's step to the client (more than a step
cannot be told from less); `direct` is the same of one stream beside, which the same client has from the decode
worker itself, so that what the router adds is the difference. `core` is how busy the router was, of 1, and `rest`
how busy the cores of engines and client were: near 1 it is the engines that are measured. `client` is the load
generator's CPU for each token or request, which it spends on another core than the router's."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run."""

    measured: Sequence[Measured]
    left_out: Sequence[str]
    cores: str
    command: str
    load_before: float
    rounds: int
    way_rounds: int

    @property
    def routers(self) -> Sequence[Measured]:
        """Without the engines themselves."""
        return [each for each in self.measured if each.router.pid is not None]

    @property
    def plans(self) -> Sequence[LoadPlan]:
        """All loads, in the order in which they came."""
        return list(dict.fromkeys(plan for each in self.measured for plan in each.samples))


def report(run: Run) -> str:
    """The whole page, but its title."""
    tables = ["## CPU", costs(run), "## Latency, ms", latencies(run), "## Bars", held(run)]
    return "\n\n".join([head(run), _COMPARABLE, *tables])


def head(run: Run) -> str:
    """The machine, the versions, and what ran."""
    now = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{os.cpu_count()} x {_processor()}, {memory:.0f} GiB, {platform.freedesktop_os_release()['PRETTY_NAME']}"
    peers = ", ".join(each.router.label for each in run.routers if each.router.version)
    lines = [
        f"Measured {now} on {machine}, Linux {platform.release()};",
        f"{run.cores}. Load average {run.load_before:.1f} before, {os.getloadavg()[0]:.1f} after with the run's own.",
        f"{run.rounds} rounds, each with all routers in turn at every load; {run.way_rounds} of them with Envoy and",
        f"with a connection a stream. From PyPI: {peers or 'none'}.",
        f"\n    {run.command}\n",
        *(f"- {each.router.name}: {each.router.runs}." for each in run.routers if each.router.runs),
        *(f"- Left out: {each}." for each in run.left_out),
    ]
    return "\n".join(lines)


def costs(run: Run) -> str:
    """The table of CPU."""
    names = (
        "load",
        "router",
        "us of CPU",
        "least - most",
        "ratio",
        "running",
        "core",
        "rest",
        "client, us",
        "tokens a message",
    )
    rows = []
    for plan, each, samples in _rows(run, run.routers):
        spent = [sample.microseconds for sample in samples]
        found = ratio(each, run.routers[0], plan)
        rows.append(
            (
                *(str(plan), each.router.label, f"{statistics.median(spent):.1f}"),
                f"{min(spent):.1f} - {max(spent):.1f}",
                "" if found is None else f"{found:.2f}",
                _running(samples),
                *(f"{_median(samples, take):.2f}" for take in (_router_cores, _other_cores)),
                f"{_median(samples, lambda sample: sample.client_microseconds):.1f}",
                f"{_median(samples, lambda sample: sample.tokens_a_message):.2f}",
            )
        )
    return _table(names, rows)


def _running(samples: Sequence[Sample]) -> str:
    found = [sample.running_microseconds for sample in samples if sample.running_microseconds is not None]
    return f"{statistics.median(found):.1f}" if found else ""


def latencies(run: Run) -> str:
    """The table of latencies, of each load for which they are the router's."""
    names = ("load", "router", "TTFT p50 / p99", "ITL p50 / p99", "jitter", "after step p50 / p99", "direct")
    rows = []
    for plan, each, samples in _rows(run, run.measured):
        if not plan.is_paced:
            continue
        later = [sample.later for sample in samples if sample.later]
        steps, direct = ([spread for spread in found if spread] for found in _transposed(later))
        rows.append(
            (
                *(str(plan).removeprefix("a token, "), each.router.label),
                str(_middle([sample.first_token for sample in samples])),
                str(_middle([each.interval for each in later])),
                f"{statistics.median(each.jitter for each in later):.2f}",
                *(str(_middle(spreads)) if spreads else "" for spreads in (steps, direct)),
            )
        )
    return _table(names, rows)


def held(run: Run) -> str:
    """The bars of each row of Baton's, and whether they were reached."""
    rows = [
        (each.router.name, name, f"{found:.2f}", f"{bar:g}", "yes" if found <= bar else "**no**")
        for each in run.routers
        if each.router.runs
        for name, found, bar in (*_relative(run, each), *_relative_running(run, each), *_absolute(run, each))
    ]
    return _table(("router", "what", "measured", "at most", "reached"), rows)


def plot(run: Run) -> str:
    """The medians of the CPU, as SVG."""
    names = [each.router.label for each in run.routers]
    groups: dict[str, dict[str, float]] = {}
    for plan, each, samples in _rows(run, run.routers):
        groups.setdefault(str(plan), {})[each.router.label] = _median(samples, lambda sample: sample.microseconds)
    return bars("Microseconds of the router's CPU; shorter is better", groups, names)


def ratio(one: Measured, other: Measured, plan: LoadPlan) -> float | None:
    """The CPU of one router to that of another: the median of the ratios of the rounds that both have."""
    a, b = one.samples.get(plan, {}), other.samples.get(plan, {})
    ratios = [a[number].microseconds / b[number].microseconds for number in a if number in b]
    return statistics.median(ratios) if ratios else None


_BARS = (
    ("paced", 256, 0.9, 0.35),
    ("paced", 64, 1.0, 0.4),
    ("flat", 256, 1.0, 0.5),
    ("flat", 64, 1.0, 0.5),
    ("flat", 0, None, 0.6),
)


def _relative(run: Run, own: Measured) -> Iterator[tuple[str, float, float]]:
    others = {each.router.name: each for each in run.routers}
    for model, number, *limits in _BARS:
        plan = LoadPlan(model, number)
        for name, bar in zip(("vllm-router", "Dynamo"), limits, strict=True):
            found = ratio(own, others[name], plan) if name in others else None
            if bar is not None and found is not None:
                yield f"CPU of {plan}, to {name}'s", found, bar


def _relative_running(run: Run, own: Measured) -> Iterator[tuple[str, float, float]]:
    plan = LoadPlan(PACED, 64)
    other = next((each for each in run.routers if each.router.name == "vllm-router"), None)
    ratios = [
        a.running_microseconds / b.running_microseconds
        for a, b in (_pairs(own, other, plan) if other else ())
        if a.running_microseconds and b.running_microseconds
    ]
    if ratios:
        yield "CPU of a token while 64 paced streams run, to vllm-router's", statistics.median(ratios), 1.0


def _absolute(run: Run, own: Measured) -> Iterator[tuple[str, float, float]]:
    paced, half = LoadPlan(PACED, 64), LoadPlan(HALF, 1024, is_steady=True)
    workers = next(each for each in run.measured if each.router.pid is None and each.router.steps == own.router.steps)
    if pairs := _pairs(own, workers, paced):
        first = statistics.median(a.first_token.p50 - b.first_token.p50 for a, b in pairs)
        yield "added to TTFT p50 at 64 streams paced, ms", first, 1.0
    steps = [sample.later for sample in own.samples.get(paced, {}).values() if sample.later]
    added = [each.since_step.p50 - each.direct.p50 for each in steps if each.since_step and each.direct]
    if added:
        yield "added to a later token's p50 at 64 streams paced, ms", statistics.median(added), 0.3
    samples = [sample.later for sample in own.samples.get(half, {}).values() if sample.later]
    if samples:
        found = statistics.median(each.interval.p99 / each.interval.p50 for each in samples)
        yield f"ITL p99 to p50 of {half}".replace("a token, ", ""), found, 3.0


def _pairs(one: Measured, other: Measured, plan: LoadPlan) -> list[tuple[Sample, Sample]]:
    a, b = one.samples.get(plan, {}), other.samples.get(plan, {})
    return [(a[number], b[number]) for number in a if number in b]


def _rows(run: Run, measured: Sequence[Measured]) -> Iterator[tuple[LoadPlan, Measured, list[Sample]]]:
    for plan in run.plans:
        for each in measured:
            if samples := list(each.samples.get(plan, {}).values()):
                yield plan, each, samples


def _transposed(later: Sequence[LaterTokens]) -> tuple[list[Spread | None], list[Spread | None]]:
    return [each.since_step for each in later], [each.direct for each in later]


def _router_cores(sample: Sample) -> float:
    return sample.router_cores


def _other_cores(sample: Sample) -> float:
    return sample.other_cores


def _median(samples: Sequence[Sample], take: Callable[[Sample], float]) -> float:
    return statistics.median(map(take, samples))


def _middle(spreads: Sequence[Spread]) -> Spread:
    """The median of each."""
    return Spread(statistics.median(each.p50 for each in spreads), statistics.median(each.p99 for each in spreads))


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
