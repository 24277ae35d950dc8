"""`baton bench`: puts load on a cluster and reports what came of it."""

import argparse
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from baton.errors import ConfigError
from cli.connection import connect
from cli.outputs import require_writable, write_text
from cli.terminal import errors
from devtools.bench import report
from devtools.bench.load import Load, Measured
from devtools.bench.profile import ProfilePlan, Profiler, profile_table
from devtools.bench.summary import Summary, Targets, summarize
from devtools.bench.traces import BLOCK_TOKENS, generate_trace, read_trace
from devtools.bench.workload import Lengths, Planned, all_at_once, at_rate, of_trace, read_lengths
from runtime.timing_profile import TimingProfile

_CONNECTIONS = 8


async def run(arguments: argparse.Namespace) -> int:
    """Prints the report, and writes it where the options say. Exit code 1 if every request has failed."""
    if arguments.action == "profile":
        require_writable({"FILE": arguments.file, "--markdown": arguments.markdown})
        return await _profile(arguments)
    _check(arguments)
    targets = Targets(arguments.ttft_target / 1e3, arguments.itl_target / 1e3)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(arguments)) for _ in range(_CONNECTIONS)]
        progress = _Progress()
        load = Load(clients, arguments.model, arguments.timeout, progress.ended)
        steps = _sweep if arguments.action == "sweep" else _replay
        summaries = []
        async for step, answers in steps(arguments, load, progress):
            summaries.append(summarize(step, answers, targets))
    _write(arguments, summaries, targets)
    return 0 if any(each.requests > each.failed for each in summaries) else 1


def _check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for an output that could not be written once everything is measured."""
    if arguments.plot is not None:
        report.check_plot(Path(arguments.plot))
    files = {"--markdown": arguments.markdown, "--json": arguments.json, "--plot": arguments.plot}
    require_writable(files)


async def _sweep(
    arguments: argparse.Namespace, load: Load, progress: "_Progress"
) -> AsyncGenerator[tuple[str, list[Measured]], None]:
    """One step for each rate or concurrency, from the least."""
    if not arguments.rate and not arguments.concurrency:
        raise ConfigError("bench sweep: give --rate, --concurrency or both")
    lengths = Lengths(
        read_lengths(Path(arguments.lengths)) if arguments.lengths else (), arguments.input, arguments.output
    )
    # Other prompts in each step: equal ones would be in the prefix caches.
    seeds = itertools.count(arguments.seed)
    for rate in sorted(arguments.rate):
        planned = at_rate(rate, arguments.requests, lengths, next(seeds))
        progress.begin(f"{rate:g}/s", planned)
        yield f"{rate:g}/s", await load.open_loop(planned)
    for concurrency in sorted(arguments.concurrency):
        planned = all_at_once(arguments.requests, lengths, next(seeds))
        progress.begin(f"{concurrency} at once", planned)
        yield f"{concurrency} at once", await load.closed_loop(planned, concurrency)


async def _replay(
    arguments: argparse.Namespace, load: Load, progress: "_Progress"
) -> AsyncGenerator[tuple[str, list[Measured]], None]:
    """A trace, in one step."""
    if bool(arguments.trace) == bool(arguments.generate):
        raise ConfigError("bench replay: give either a TRACE or --generate")
    if arguments.trace:
        trace = read_trace(Path(arguments.trace))[: arguments.requests]
        name = Path(arguments.trace).name
    else:
        trace = generate_trace(arguments.seed, arguments.requests, arguments.seconds, arguments.generate)
        name = arguments.generate
    planned = of_trace(trace, arguments.speedup, min(arguments.block_tokens, BLOCK_TOKENS), arguments.max_output)
    progress.begin(name, planned)
    yield name, await load.open_loop(planned)


async def _profile(arguments: argparse.Namespace) -> int:
    plan = ProfilePlan(
        arguments.prompts,
        arguments.batches,
        arguments.contexts,
        max(2, arguments.answer),
        arguments.repeats,
        arguments.seed,
    )
    progress = _Progress()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(arguments)) for _ in range(_CONNECTIONS)]
        load = Load(clients, arguments.model, arguments.timeout, progress.ended)
        profile = await Profiler(load, plan, progress.begin).measure(arguments.model)
    _write_profile(arguments, profile)
    return 0


def _write_profile(arguments: argparse.Namespace, profile: TimingProfile) -> None:
    text = profile_table(profile)
    print(text, end="")
    write_text("FILE", arguments.file, profile.to_json())
    if arguments.markdown is not None:
        write_text("--markdown", arguments.markdown, text)


class _Progress:
    """Prints how far a step has come, at most a hundred times, to standard error."""

    def __init__(self) -> None:
        self._console = errors()
        self._step, self._total, self._done, self._failed = "", 0, 0, 0

    def begin(self, step: str, planned: Sequence[Planned]) -> None:
        """Another step begins."""
        self._step, self._total, self._done, self._failed = step, len(planned), 0, 0

    def ended(self, measured: Measured) -> None:
        """A request has ended."""
        self._done += 1
        self._failed += bool(measured.error)
        if self._done == self._total or self._done % max(1, self._total // 100) == 0:
            end = "\n" if self._done == self._total else "\r"
            self._console.print(f"{self._step}: {self._done} of {self._total}, {self._failed} failed", end=end)


def _write(arguments: argparse.Namespace, summaries: list[Summary], targets: Targets) -> None:
    title = f"baton bench {arguments.action}"
    text = report.markdown(title, summaries, targets)
    print(text, end="")
    if arguments.markdown is not None:
        write_text("--markdown", arguments.markdown, text)
    if arguments.json is not None:
        write_text("--json", arguments.json, report.as_json(title, summaries, targets))
    if arguments.plot is not None:
        report.plot(Path(arguments.plot), title, summaries)
