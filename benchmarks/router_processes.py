"""The throughput of a router of several processes, as a ratio to one process: `python -m router CONFIG processes=N`.

    python -m benchmarks.router_processes [--processes 1 2 4] [--workers 8] [--clients 8] [--seconds 6] [--rounds 2]

Each router has as many cores for itself as it has processes, and the hardware threads beside them stay free; simulated
workers and clients, a process each, have the other cores, of which they need about five times as many as the largest
router. Every client keeps answers running over its connections, flat out, as many for each process of the router, so
that it is saturated: what is compared is how much it serves.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.peers.clients.grpc_client import GrpcClient
from benchmarks.peers.clients.load import FLAT
from benchmarks.peers.cores import cpu_of_tree, on_cores, running
from benchmarks.processes import child, received, run_process, until_told
from benchmarks.router_overhead import prompts, worker_config
from benchmarks.two_gpus.report import table
from cli.local.ports import free_port
from discovery.config import RegistryConfig
from services.server import host_worker

CONNECTIONS, LANES = 16, 24
"""Of each client: its connections, and the answers that it keeps running for each process of the router."""

LOADS = {"tokens of answers of 128": 128, "requests of 1 token": 1}
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """In one window: answers' tokens a second, and how many cores the router used."""

    tokens_per_second: float
    cores: float


def run_worker(pipe: Connection, folder: str, number: int) -> None:
    """Serves a prefill and a decode worker until the pipe ends."""

    async def serve() -> None:
        registry = RegistryConfig(kind="file", folder=Path(folder))
        async with AsyncExitStack() as stack:
            for role in ("prefill", "decode"):
                config = worker_config(FLAT, role, 0.0)
                update = {"worker_id": f"{role}-{number}", "server": "http2", "registry": registry}
                await stack.enter_async_context(host_worker(config.model_copy(update=update)))
            pipe.send("ready")
            await until_told(pipe)

    run_process(serve)


def run_client(pipe: Connection, address: str, number: int) -> None:
    """For each (tokens, lanes, begin, end) from the pipe, sends load until `end`, and then how much came."""

    async def serve() -> None:
        client = GrpcClient(address, CONNECTIONS, prompts(number * 1_000_000))
        while True:
            await asyncio.to_thread(pipe.poll, None)
            asked = pipe.recv()
            if asked == "stop":
                return
            pipe.send(await _count(client, *asked))

    run_process(serve)


async def _count(client: GrpcClient, tokens: int, lanes: int, begin: float, end: float) -> float:
    """The tokens that come between two times of the system's clock, of answers that are asked for until the end."""
    counted = 0.0

    async def lane() -> None:
        nonlocal counted
        while time.time() < end:
            answer = await client.answer(FLAT, tokens)
            late = time.perf_counter() - time.time()
            inside = sum(begin <= at - late < end for at in answer.arrivals)
            counted += answer.tokens * inside / len(answer.arrivals)

    await asyncio.gather(*(lane() for _ in range(lanes)))
    return counted


@asynccontextmanager
async def router(processes: int, folder: Path, cores: frozenset[int]) -> AsyncIterator[tuple[str, int]]:
    """The address and the process id of a router on cores of its own."""
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "listen": address,
        "processes": processes,
        "server": "http2",
        "drain_seconds": 0,
        "registry": f"{{kind: file, folder: {folder}}}",
        "routing.policy": "least_loaded",
        "admission.max_running_per_worker": 4096,
        "probe": "{timeout_seconds: 20, hung_seconds: 60}",
        "log.format": "json",
    }
    command = [sys.executable, "-m", "router", "deploy/config/router.yaml", *(f"{k}={v}" for k, v in settings.items())]
    async with running(command, Path(os.devnull), cores) as process:
        yield address, process.pid


async def measure(processes: int, options: argparse.Namespace, folder: Path, own: frozenset[int]) -> dict[str, Served]:
    """The throughput of one router under each load."""
    found = {}
    async with router(processes, folder, own) as (address, pid), AsyncExitStack() as stack:
        await _until_ready(address)
        clients = [
            (await stack.enter_async_context(child(run_client, address, number)))[0]
            for number in range(options.clients)
        ]
        for name, tokens in LOADS.items():
            begin = time.time() + 2 + options.seconds / 3
            end = begin + options.seconds
            for pipe in clients:
                pipe.send((tokens, LANES * processes, begin, end))
            await asyncio.sleep(begin - time.time())
            before = cpu_of_tree(pid)
            await asyncio.sleep(end - time.time())
            cores = (cpu_of_tree(pid) - before) / 1e9 / options.seconds
            counts = [await received(pipe) for pipe in clients]
            found[name] = Served(sum(counts) / options.seconds, cores)
    return found


async def _until_ready(address: str) -> None:
    """Returns when answers come."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        client = GrpcClient(address, 1)
        try:
            await asyncio.gather(*(client.answer(FLAT, 2) for _ in range(64)))
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)
        finally:
            client.close()


def _cores() -> list[tuple[int, ...]]:
    """The hardware threads of each core that this process may use."""
    allowed = os.sched_getaffinity(0)
    found: dict[str, tuple[int, ...]] = {}
    for thread in sorted(allowed):
        file = Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list")
        core = file.read_text().strip() if file.exists() else str(thread)
        found[core] = (*found.get(core, ()), thread)
    return list(found.values())


async def main(options: argparse.Namespace) -> None:
    cores = _cores()
    most = max(options.processes)
    if len(cores) <= most:
        print(f"{len(cores)} cores are too few: routers and all others share them, and the ratios mean nothing.\n")
    own_cores = cores[:most]
    rest = frozenset(thread for core in cores[most:] or cores for thread in core)
    os.sched_setaffinity(0, rest)
    found: dict[int, list[dict[str, Served]]] = {processes: [] for processes in options.processes}
    with tempfile.TemporaryDirectory() as name:
        async with AsyncExitStack() as stack:
            workers = [
                (await stack.enter_async_context(child(run_worker, name, number)))[0]
                for number in range(options.workers)
            ]
            for pipe in workers:
                await received(pipe)
            for _ in range(options.rounds):
                for processes in options.processes:
                    own = frozenset(core[0] for core in own_cores[:processes])
                    with on_cores(rest):
                        found[processes].append(await measure(processes, options, Path(name), own))
    print(
        f"{len(cores)} cores of {len(cores[0])} hardware threads, of which the router has one each. On the others",
        end=" ",
    )
    print(f"{options.workers} workers, {options.clients} clients, {CONNECTIONS} connections a client.\n")
    rows = []
    first = found[options.processes[0]]
    for load in LOADS:
        for processes, rounds in found.items():
            ratios = [
                one[load].tokens_per_second / base[load].tokens_per_second
                for one, base in zip(rounds, first, strict=True)
            ]
            rate = statistics.median(one[load].tokens_per_second for one in rounds)
            used = statistics.median(one[load].cores for one in rounds)
            rows.append([load, processes, f"{rate:,.0f}", f"{used:.2f}", f"{statistics.median(ratios):.2f}"])
    table(["load", "processes", "a second", "cores used", "ratio"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=2)
    asyncio.run(main(parser.parse_args()))
