"""`baton bench compare`: the same load for several servers, in turns."""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from baton.errors import ConfigError
from cli.commands.benchmarks.loads import steps_of, workload_of
from cli.commands.benchmarks.progress import Progress
from cli.commands.benchmarks.reports import check_files, write_comparison
from cli.commands.benchmarks.servers import Target, target_of, warm_up
from devtools.bench.comparison import Comparison, Row
from devtools.bench.steps import Step
from devtools.bench.summary import Summary, Targets, summarize
from devtools.bench.workload import Workload


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
        """One server in one round: with the lengths that the others get, and prompts that nobody else gets."""
        target = self._targets[index]
        prompts = (number + 1) * len(self._targets) + index
        planned = step.plan(replace(self._workload, prompts=prompts))
        self._progress.begin(f"{step.name}, round {number + 1} of {rounds}, {target.name}", planned)
        return summarize(step.name, await step.run(target.load, planned), self._limits)
