"""`baton bench`: puts load on a server and reports what came of it."""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from baton.errors import ConfigError
from cli.commands.benchmarks.reports import Progress, check_files, write_comparison, write_steps
from cli.commands.benchmarks.servers import Target, steps_of, target_of, warm_up, workload_of
from cli.outputs import require_writable, write_text
from devtools.bench.agents import trace_of_sessions
from devtools.bench.comparison import Comparison, Row
from devtools.bench.load import Step
from devtools.bench.profile import ProfilePlan, Profiler, profile_table
from devtools.bench.report import Summary, Targets, summarize
from devtools.bench.traces import BLOCK_TOKENS, generate_trace, read_trace
from devtools.bench.workload import Planned, Workload, of_trace
from engine_protocol.timing_profile import TimingProfile


async def run(arguments: argparse.Namespace) -> int:
    """Prints the report, and writes it where the options say. Exit code 1 if every request has failed."""
    match arguments.action:
        case "profile":
            require_writable({"FILE": arguments.file, "--markdown": arguments.markdown})
            return await _profile(arguments)
        case "compare":
            return await compare(arguments)
        case _:
            check_files(arguments)
            targets = Targets(arguments.ttft_target / 1e3, arguments.itl_target / 1e3)
            summaries = await (_sweep if arguments.action == "sweep" else _replay)(arguments, targets)
            write_steps(arguments, summaries, targets)
            return 0 if any(each.requests > each.failed for each in summaries) else 1


async def _sweep(arguments: argparse.Namespace, targets: Targets) -> list[Summary]:
    """One step for each rate or concurrency, from the least."""
    steps, workload, progress = steps_of(arguments), workload_of(arguments), Progress()
    summaries = []
    async with target_of(arguments, arguments.url, progress) as target:
        await warm_up(target, workload, arguments.warmup, progress)
        for step in steps:
            planned = step.plan(workload)
            progress.begin(step.name, planned)
            summaries.append(summarize(step.name, await step.run(target.load, planned), targets))
    return summaries


async def _replay(arguments: argparse.Namespace, targets: Targets) -> list[Summary]:
    """A trace, in one step."""
    name, planned = _trace(arguments)
    progress = Progress()
    async with target_of(arguments, arguments.url, progress) as target:
        progress.begin(name, planned)
        return [summarize(name, await target.load.open_loop(planned), targets)]


def _trace(arguments: argparse.Namespace) -> tuple[str, list[Planned]]:
    if bool(arguments.trace) == bool(arguments.generate):
        raise ConfigError("bench replay: give either a TRACE or --generate")
    if arguments.trace:
        trace = read_trace(Path(arguments.trace))[: arguments.requests]
        name = Path(arguments.trace).name
    else:
        name = arguments.generate
        seed, requests, seconds = arguments.seed, arguments.requests, arguments.seconds
        if name == "sessions":
            trace = trace_of_sessions(seed, requests, seconds)
        else:
            trace = generate_trace(seed, requests, seconds, name)
    block_tokens = min(arguments.block_tokens, BLOCK_TOKENS)
    return name, of_trace(trace, arguments.speedup, block_tokens, arguments.max_output)


async def _profile(arguments: argparse.Namespace) -> int:
    plan = ProfilePlan(
        arguments.prompts,
        arguments.batches,
        arguments.contexts,
        max(2, arguments.answer),
        arguments.repeats,
        arguments.seed,
    )
    progress = Progress()
    async with target_of(arguments, arguments.url, progress) as target:
        profile = await Profiler(target.load, plan, progress.begin).measure(arguments.model)
    _write_profile(arguments, profile)
    return 0


def _write_profile(arguments: argparse.Namespace, profile: TimingProfile) -> None:
    text = profile_table(profile)
    print(text, end="")
    write_text("FILE", arguments.file, profile.to_json())
    if arguments.markdown is not None:
        write_text("--markdown", arguments.markdown, text)


async def compare(arguments: argparse.Namespace) -> int:
    """Prints the report. Exit code 1 if every request of a server has failed."""
    if len(set(arguments.url)) < max(2, len(arguments.url)):
        raise ConfigError("bench compare: give at least two different --url")
    check_files(arguments)
    steps, workload, progress = steps_of(arguments), workload_of(arguments), Progress()
    async with AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(target_of(arguments, url, progress)) for url in arguments.url]
        for index, target in enumerate(targets):
            await warm_up(target, replace(workload, prompts=index), arguments.warmup, progress)
        turns = _Turns(targets, workload, Targets(arguments.ttft_target / 1e3, arguments.itl_target / 1e3), progress)
        rows = [row for step in steps for row in await turns.rows(step, arguments.rounds)]
    write_comparison(arguments, Comparison(tuple(rows)))
    return 0 if all(any(each.requests > each.failed for each in row.rounds) for row in rows) else 1


class _Turns:
    """The rounds of a step. Each begins with another server, so that none is always measured first."""

    def __init__(self, targets: Sequence[Target], workload: Workload, limits: Targets, progress: Progress) -> None:
        self._targets = targets
        self._workload = workload
        self._limits = limits
        self._progress = progress

    async def rows(self, step: Step, rounds: int) -> list[Row]:
        found: dict[str, list[Summary]] = defaultdict(list)
        for number in range(rounds):
            first = number % len(self._targets)
            for index in (*range(first, len(self._targets)), *range(first)):
                target = self._targets[index]
                found[target.name].append(await self._measure(step, number, index, rounds))
        return [Row(step.name, target.name, tuple(found[target.name])) for target in self._targets]

    async def _measure(self, step: Step, number: int, index: int, rounds: int) -> Summary:
        """One server in one round: with the lengths that the others get, and prompts of its own."""
        target = self._targets[index]
        prompts = (number + 1) * len(self._targets) + index
        planned = step.plan(replace(self._workload, prompts=prompts))
        self._progress.begin(f"{step.name}, round {number + 1} of {rounds}, {target.name}", planned)
        return summarize(step.name, await step.run(target.load, planned), self._limits)
