"""The cost of a long prompt to the router, and the delay of its first token, beside other projects' routers.

    python -m benchmarks.peers.long_prompts [--tokens 8000 32000 100000] [--requests 10] [--rounds 3]
        [--peers vllm-router sglang-router smg] [--output FILE]

Requests of one token come one after another: with prompts that are new, and with prompts of which 95 % were sent
before; as text (a byte is a token) and as token ids. The router has a core for itself, and routes by its default
policy, so that it hashes blocks and looks for cached prefixes; the peers route by theirs. CPU is that of the router's
processes for each request: seconds of it are the cores that one request a second takes. `added` is the median time to
the first token less that of such a prompt sent to the engine itself. Baton tokenizes texts, validates ids, and sends
ids to its workers; relays pass on the bytes that they got.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Final

from benchmarks.peers.clients.load import FLAT
from benchmarks.peers.clients.long_prompts import HttpSender, Prompt, RouterSender, Sender, WorkerSender
from benchmarks.peers.cores import Cores, cpu_of_tree, share_cores
from benchmarks.peers.environments import FOLDER
from benchmarks.peers.routers import PEERS, Baton, Bench, Router, baton, engines
from benchmarks.peers.workers import workers
from cli.local.ports import free_port

_SEEN: Final = 0.95
_CONTEXT: Final = 131_072
_BAR_TOKENS, _BAR_CORES = 100_000, 0.05


@dataclass(frozen=True, slots=True)
class Load:
    """One row: prompts of so many tokens, text or ids, new or mostly sent before."""

    tokens: int
    is_text: bool
    seen: float

    def __str__(self) -> str:
        how = f"{self.seen:.0%} seen" if self.seen else "new"
        return f"{self.tokens:,} tokens, {'text' if self.is_text else 'ids'}, {how}"

    def prompts(self, number: int, source: random.Random) -> Iterator[Prompt]:
        """The one that makes the common part known, and then so many."""
        known = _bytes(int(self.tokens * self.seen), source)
        for _ in range(1 + number):
            prompt = known + _bytes(self.tokens - len(known), source)
            yield prompt.decode() if self.is_text else list(prompt)


@dataclass(slots=True)
class Server:
    """A router, or an engine without one (`pid` is 0), and its rounds: CPU and first tokens, in milliseconds."""

    name: str
    pid: int
    sender: Sender
    engine: str = ""  # the name of the engine that it stands before
    cpu: dict[Load, list[float]] = field(default_factory=dict)
    first_token: dict[Load, list[float]] = field(default_factory=dict)
    refused: set[bool] = field(default_factory=set)  # text, or ids: once it has refused one, it gets no more

    async def measure(self, load: Load, requests: int, seed: str) -> None:
        """One round."""
        prompts = [*load.prompts(requests, random.Random(seed))]
        await self.sender.first_token_seconds(prompts[0])
        await asyncio.sleep(0.2)  # Its prefix is reported by the worker in the background.
        before = cpu_of_tree(self.pid) if self.pid else 0
        seconds = [await self.sender.first_token_seconds(prompt) for prompt in prompts[1:]]
        if self.pid:
            self.cpu.setdefault(load, []).append((cpu_of_tree(self.pid) - before) / requests / 1e6)
        self.first_token.setdefault(load, []).append(statistics.median(seconds) * 1e3)


def _bytes(number: int, source: random.Random) -> bytes:
    """Words of letters, as many bytes as asked."""
    words = [bytes(source.choices(b"abcdefghijklmnopqrstuvwxyz", k=source.randint(2, 9))) for _ in range(number // 4)]
    return (b" ".join(words) + b" " * number)[:number]


@asynccontextmanager
async def servers(options: argparse.Namespace, cores: Cores) -> AsyncIterator[list[Server]]:
    """Baton, the peers that can be started, and the engines of both."""
    async with AsyncExitStack() as stack:
        bench = await _bench(options.folder, cores, stack)
        router = await stack.enter_async_context(baton(bench, Baton("Baton", "http2", policy="predicted_seconds"), ()))
        prefill = next(record.address for record in bench.records if record.worker_id == f"{FLAT}-prefill")
        found = [
            Server("worker", 0, WorkerSender(prefill)),
            Server("HTTP engine", 0, HttpSender(bench.engines[1])),
            _server(router, RouterSender(router.address), "worker"),
        ]
        for name in options.peers:
            try:
                peer: Router = await stack.enter_async_context(PEERS[name](bench, ()))
            except (OSError, asyncio.TimeoutError) as error:
                print(f"{name} is left out: {error!r}", file=sys.stderr)
                continue
            port = int(peer.address.rpartition(":")[2])
            found.append(_server(peer, HttpSender(port, peer.served), "HTTP engine"))
        for each in found:
            stack.push_async_callback(each.sender.close)
        yield found


def _server(router: Router, sender: Sender, engine: str) -> Server:
    assert router.pid
    return Server(router.label, router.pid, sender, engine)


async def _bench(folder: Path, cores: Cores, stack: AsyncExitStack) -> Bench:
    log, steps = folder / "log", folder / "steps"
    records, _, spans = await stack.enter_async_context(workers(steps, _CONTEXT))
    ports = (free_port(), free_port())
    await stack.enter_async_context(engines(ports, folder / "http-steps", log, cores))
    return Bench(folder, cores, log, records, spans, ports, steps, folder / "http-steps")


async def measure(options: argparse.Namespace, cores: Cores) -> str:
    """All rounds, from one server to the next, as a page."""
    loads = [Load(*each) for each in product(options.tokens, (True, False), (0.0, _SEEN))]
    async with servers(options, cores) as found:
        for number, load in product(range(options.rounds), loads):
            for server in found:
                if load.is_text in server.refused:
                    continue
                try:
                    await server.measure(load, options.requests, f"{number}/{load}/{server.name}")
                except OSError as error:
                    print(f"{server.name}, {load}: {error!r}", file=sys.stderr)
                    server.refused.add(load.is_text)
        return page(found, loads, cores, options)


def page(found: Sequence[Server], loads: Sequence[Load], cores: Cores, options: argparse.Namespace) -> str:
    """The table, and the bar."""
    lines = [
        f"`python -m benchmarks.peers.long_prompts`, {options.rounds} rounds of {options.requests} requests; {cores}; "
        f"load average {os.getloadavg()[0]:.1f} at the end. CPU and TTFT are medians of the rounds.",
        "",
        "| prompt | router | CPU of a request, ms | least - most | TTFT, ms | added, ms |",
        "|---|---|---|---|---|---|",
    ]
    engines_of = {each.name: each for each in found if not each.pid}
    for load in loads:
        for server in found:
            if load not in server.first_token:
                continue
            took = statistics.median(server.first_token[load])
            cells = [str(load), server.name if server.pid else f"no router ({server.name})"]
            cells += [*_cpu_cells(server.cpu.get(load, ())), f"{took:.2f}"]
            own = engines_of[server.engine].first_token.get(load) if server.engine else None
            cells.append(f"{took - statistics.median(own):.2f}" if own else "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_bars(found)]) + "\n"


def _cpu_cells(rounds: Sequence[float]) -> list[str]:
    if not rounds:
        return ["", ""]
    return [f"{statistics.median(rounds):.2f}", f"{min(rounds):.2f} - {max(rounds):.2f}"]


def _bars(found: Sequence[Server]) -> Iterator[str]:
    own = next(each for each in found if each.name == "Baton")
    for load, rounds in own.cpu.items():
        if load.tokens == _BAR_TOKENS and load.seen:
            cores = statistics.median(rounds) / 1e3
            reached = "reached" if cores <= _BAR_CORES else "**not reached**"
            yield f"- {load}: {cores:.4f} core for each request a second, at most {_BAR_CORES}: {reached}."


def main() -> None:
    """Prints the page."""
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8_000, 32_000, 100_000])
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    peers = [name for name in PEERS if name != "dynamo"]
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    printed = uvloop.run(measure(options, share_cores()))
    print(printed)
    if options.output:
        options.output.write_text(f"# long_prompts\n\n{printed}", encoding="utf-8")


if __name__ == "__main__":
    main()
