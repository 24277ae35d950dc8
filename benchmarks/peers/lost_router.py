"""Streams that are lost with their router: Baton beside other projects' routers, each killed once under 200 streams.

    python -m benchmarks.peers.lost_router [--streams 200] [--peers vllm-router sglang-router smg dynamo]

Each stream has 128 tokens, 30 a second, and a client that waits for all of them. Two seconds after the first has begun,
the router's processes get SIGKILL. A stream is lost if its client does not get the rest. Baton has a second router, and
its clients ask for answers that survive (`Resume`); the others have no call by which another router goes on with a
stream, so a second one would not change their figures: a client can only send the request again, from its beginning.
"""

import argparse
import asyncio
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import psutil

from baton import AsyncClient, Resume
from baton.errors import BatonError
from baton.inference.v1 import generate_pb2
from benchmarks.peers.clients.load import PACED, PROMPTS, TOKENS, Answer
from benchmarks.peers.cores import Cores
from benchmarks.peers.environments import FOLDER
from benchmarks.peers.routers import EACH, PEERS, Baton, Bench, Router, baton, engines
from benchmarks.peers.workers import workers
from cli.local.ports import free_port

_KILLED_SECONDS, _SPREAD_SECONDS = 2.0, 1.0
_PATIENCE_SECONDS = 60.0
_PROGRAMS = 20  # clients that have Baton's streams

Ask = Callable[[int], Awaitable[Answer]]


async def _bench(stack: AsyncExitStack, folder: Path, cores: Cores) -> Bench:
    log, steps, http_steps = folder / "log", folder / "baton-steps", folder / "http-steps"
    records, _, spans = await stack.enter_async_context(workers(steps))
    ports = free_port(), free_port()
    await stack.enter_async_context(engines(ports, http_steps, log, cores))
    return Bench(folder, cores, log, records, spans, ports, steps, http_steps)


async def _lost(router: Router, streams: int, ask: Ask) -> str:
    """Kills a router under its streams. Returns how many were lost, and the longest gap of those that were not."""

    async def one(number: int) -> Answer:
        await asyncio.sleep(number * _SPREAD_SECONDS / streams)
        return await asyncio.wait_for(ask(number), _PATIENCE_SECONDS)

    running = [asyncio.create_task(one(number)) for number in range(streams)]
    await asyncio.sleep(_KILLED_SECONDS)
    assert router.pid is not None
    begun = sum(not task.done() for task in running)
    for process in [*psutil.Process(router.pid).children(recursive=True), psutil.Process(router.pid)]:
        process.send_signal(signal.SIGKILL)
    ended = await asyncio.gather(*running, return_exceptions=True)
    whole = [one for one in ended if isinstance(one, Answer) and one.tokens == one.expected]
    gaps = sorted(max(b - a for a, b in zip(one.arrivals, one.arrivals[1:], strict=False)) for one in whole)
    said = f"| {router.label} | {begun} | {streams - len(whole)} | "
    return said + (f"{gaps[len(gaps) // 2] * 1e3:.0f} / {gaps[-1] * 1e3:.0f} |" if gaps else "- |")


async def _baton(bench: Bench, streams: int) -> str:
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(baton(bench, Baton("Baton", "http2"), ())) for _ in range(2)]
        opened = [AsyncClient(f"{first.address},{second.address}", resume=Resume()) for _ in range(_PROGRAMS)]
        clients = [await stack.enter_async_context(client) for client in opened]
        for client in clients:
            await _answer(client, 2)
        return await _lost(first, streams, lambda number: _answer(clients[number % len(clients)], TOKENS[PACED]))


async def _answer(client: AsyncClient, tokens: int) -> Answer:
    answer = Answer(tokens)
    request = generate_pb2.GenerateRequest(model=PACED, prompt=next(PROMPTS))
    request.stopping.max_tokens, request.stopping.ignore_eos = tokens, True
    loop = asyncio.get_running_loop()
    async with client.generate(request) as events:
        async for event in events:
            if event.token.token_ids:
                answer.note(loop.time(), len(event.token.token_ids))
    return answer


async def _peer(bench: Bench, name: str, streams: int) -> str:
    async with PEERS[name](bench, (EACH,)) as router:
        client = router.clients[EACH]
        await client.answer(PACED, 2)
        return await _lost(router, streams, lambda _number: client.answer(PACED, TOKENS[PACED]))


async def main(streams: int, peers: Sequence[str]) -> None:
    """Prints a row for each router."""
    print("| router | streams that ran | lost | longest gap of the others, ms: p50 / most |\n| --- | --- | --- | --- |")
    async with AsyncExitStack() as stack:
        # Nothing is measured that needs a core for itself.
        cores = frozenset(os.sched_getaffinity(0))
        bench = await _bench(stack, FOLDER, Cores(cores, cores))
        print(await _baton(bench, streams), flush=True)
        for name in peers:
            try:
                print(await _peer(bench, name, streams), flush=True)
            except (OSError, TimeoutError, BatonError) as error:
                print(f"{name} is left out: {error!r}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--peers", nargs="*", choices=tuple(PEERS), default=list(PEERS))
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(main(options.streams, options.peers))
