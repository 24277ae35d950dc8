"""The cost of tokens and requests to the router, beside routers of other projects, in one run: `make bench-router`.

    python -m benchmarks.peers.compare [--rounds 3] [--streams 64 256 1024]
        [--peers vllm-router sglang-router smg dynamo] [--python PYTHON] [--no-compiled] [--grpcio]
        [--beside NAME=PYTHON] [--output FOLDER]

Each round gives every router the same load, one router after the other: requests of one token; streams of 128 tokens,
30 a second and as fast as they go; 1,024 streams at half the pace, which start within a second, or one after another
over the length of a stream; and, in the first round, a connection for each stream, and Envoy, with 256 streams. All
prompts have 512 bytes. The router has a core for itself; engines, clients and Envoy share the others. report.py says
what is printed, and what is comparable. A router that cannot be started is named, and left out.

Baton has two rows: this checkout's modules as they are, and compiled, where environments.py has compiled them; both run
on that environment's interpreter. `--python` runs the first one on another; `--beside` adds a row for the Baton that
another environment has installed (or this checkout's, if it has none).
"""

import argparse
import asyncio
import os
import re
import resource
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from baton.errors import ConfigError
from benchmarks.peers.clients.load import FLAT, HALF, PACED, requests
from benchmarks.peers.cores import Cores, share_cores
from benchmarks.peers.environments import COMPILED, FOLDER
from benchmarks.peers.measure import LoadPlan, Measured
from benchmarks.peers.report import Run, plot, report
from benchmarks.peers.routers import (
    EACH,
    ENVOY,
    PEERS,
    Baton,
    Bench,
    Router,
    baton,
    direct_to_engine,
    direct_to_workers,
    engines,
)
from benchmarks.peers.workers import workers
from cli.local.ports import free_port

_DIRECT_STREAMS = 64
_COMPILED = "Baton (http2, compiled)"
_FAILURES = (OSError, ConfigError, asyncio.TimeoutError)


def plans(options: argparse.Namespace, turn: int) -> Iterator[LoadPlan]:
    """The loads of a round; the first is 0."""
    yield LoadPlan(FLAT, 0)
    for number in options.streams:
        yield LoadPlan(PACED, number)
        yield LoadPlan(FLAT, number)
    for number in options.half:
        yield LoadPlan(HALF, number)
        yield LoadPlan(HALF, number, is_steady=True)
    for way in options.ways if turn < options.way_rounds else ():
        yield LoadPlan(PACED, options.way_streams, way)
        yield LoadPlan(FLAT, options.way_streams, way)


def candidates(options: argparse.Namespace) -> Iterator[Baton]:
    """The rows of Baton's."""
    is_compiled = options.compiled and COMPILED.is_current(options.folder)
    compiled_python = str(COMPILED.python(options.folder))
    python = options.python or (compiled_python if is_compiled else sys.executable)
    yield Baton("Baton (http2)", "http2", python)
    if is_compiled:
        yield Baton(_COMPILED, "http2", compiled_python, is_installed=True)
    if options.grpcio:
        yield Baton("Baton (grpcio)", "grpcio", python)
    for each in options.beside:
        name, _, python = each.partition("=")
        yield Baton(name, "http2", python, is_installed=True)


class Comparison:
    """All routers, and the rounds."""

    def __init__(self, options: argparse.Namespace, cores: Cores) -> None:
        self._options = options
        self._cores = cores
        self.measured: list[Measured] = []
        self.left_out: list[str] = []
        self.finished_rounds = 0

    async def run(self) -> None:
        """Starts everything, and measures. SIGTERM ends it in order: no process is left behind, and the rounds that are
        finished by then are there.
        """
        task = asyncio.current_task()
        assert task
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with AsyncExitStack() as stack:
            for router in await self._start(stack):
                try:
                    if router.pid is not None:
                        for client in router.clients.values():
                            await requests(client)  # To warm up.
                except _FAILURES as error:
                    self._leave_out(router.name, error)
                else:
                    self.measured.append(Measured(router))
            for number in range(self._options.rounds):
                try:
                    for plan in plans(self._options, number):
                        await self._measure(plan, number)
                except asyncio.CancelledError:
                    self._forget(number)
                    raise
                self.finished_rounds = number + 1

    def _forget(self, number: int) -> None:
        """Drops the samples of a round that has not come to its end."""
        for each in self.measured:
            for rounds in each.samples.values():
                rounds.pop(number, None)
            each.samples = {plan: rounds for plan, rounds in each.samples.items() if rounds}

    async def _measure(self, plan: LoadPlan, number: int) -> None:
        # Each round begins with another one: the first finds engines and a client that have rested.
        first = number % len(self.measured)
        for each in (*self.measured[first:], *self.measured[:first]):
            if each.router.pid is None and plan.number != _DIRECT_STREAMS and plan.model != HALF:
                continue
            try:
                await each.measure(plan, number, self._cores)
            except _FAILURES as error:
                self._leave_out(f"{each.router.name}, {plan}", error)

    def _leave_out(self, name: str, error: BaseException) -> None:
        said = f"{name}: {error!r}"
        print(said, file=sys.stderr)
        if said not in self.left_out:
            self.left_out.append(said)

    async def _start(self, stack: AsyncExitStack) -> list[Router]:
        """All routers that can be started, and the engines without any."""
        bench = await self._bench(stack)
        found: list[Router] = []
        starting = [(each.name, baton(bench, each, self._options.ways)) for each in candidates(self._options)]
        starting += [(name, PEERS[name](bench, self._options.ways)) for name in self._options.peers]
        for name, context in starting:
            try:
                found.append(await stack.enter_async_context(context))
            except _FAILURES as error:
                self._leave_out(name, error)
        if self._options.compiled and not COMPILED.is_current(self._options.folder):
            self._leave_out(
                _COMPILED, OSError("this checkout's code is not compiled; benchmarks.peers.environments says why")
            )
        direct = [direct_to_workers(bench), direct_to_engine(bench)]
        for router in direct:
            for client in router.clients.values():
                stack.callback(client.close)
        return [*found, *direct]

    async def _bench(self, stack: AsyncExitStack) -> Bench:
        folder = self._options.folder
        folder.mkdir(parents=True, exist_ok=True)
        log, baton_steps, http_steps = (folder / name for name in ("log", "baton-steps", "http-steps"))
        for path in (log, baton_steps, http_steps):
            path.unlink(missing_ok=True)
        records, _, spans = await stack.enter_async_context(workers(baton_steps))
        ports = (free_port(), free_port())
        await stack.enter_async_context(engines(ports, http_steps, log, self._cores))
        return Bench(folder, self._cores, log, records, spans, ports, baton_steps, http_steps)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 256, 1024], help="paced, and flat out")
    parser.add_argument("--half", type=int, nargs="*", default=[1024], help="streams at half the pace")
    parser.add_argument("--ways", nargs="*", choices=(EACH, ENVOY), default=[EACH, ENVOY], help="beside the usual one")
    parser.add_argument("--way-streams", type=int, default=256)
    parser.add_argument("--way-rounds", type=int, default=1, help="in how many of the rounds they are measured")
    parser.add_argument("--peers", nargs="*", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--grpcio", action="store_true", help="a row for Baton with `server: grpcio`, too")
    parser.add_argument("--python", help="the interpreter of Baton's router (the compiled one's, or this one)")
    parser.add_argument(
        "--compiled", action=argparse.BooleanOptionalAction, default=True, help="a row for it, compiled"
    )
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=PYTHON", help="one more row of Baton's")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--output", type=Path, help="a folder for router_peers.md and router_peers.svg")
    return parser.parse_args(words)


def main() -> None:
    """Measures, and prints the page."""
    import uvloop

    options = parse()
    load_before, cores = os.getloadavg()[0], share_cores()
    # The client keeps a connection for each stream of each router, and so does each router.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    comparison = Comparison(options, cores)
    ended = None
    try:
        uvloop.run(comparison.run())
    except asyncio.CancelledError:
        ended = f"ended by SIGTERM after {comparison.finished_rounds} of {options.rounds} rounds"
        if not comparison.finished_rounds:
            sys.exit(ended)
    # Without the folders of this machine's interpreters.
    words = [re.sub(r"(^|=)/\S*/", r"\1", word) for word in sys.argv[1:]]
    command = " ".join(["python -m benchmarks.peers.compare", *map(shlex.quote, words)])
    rounds = comparison.finished_rounds
    way_rounds = min(rounds, options.way_rounds)
    run = Run(comparison.measured, comparison.left_out, str(cores), command, load_before, rounds, way_rounds)
    printed = report(run)
    print(printed)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "router_peers.md").write_text(f"# router_peers\n\n{printed}\n", encoding="utf-8")
        (options.output / "router_peers.svg").write_text(plot(run), encoding="utf-8")
    sys.exit(ended)


if __name__ == "__main__":
    main()
