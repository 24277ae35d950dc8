"""Moves running answers between workers again and again while processes are lost, and drains a worker by moving.

    PYTHONPATH=.:tests .venv/bin/python benchmarks/moves.py [--moves 1000] [--at-once 24]
    PYTHONPATH=.:tests .venv/bin/python benchmarks/moves.py --drain [--streams 16] [--tokens 2000]
    PYTHONPATH=.:tests .venv/bin/python benchmarks/moves.py --roles 200 [--at-once 24]

The first starts simulated workers and two routers, and kills, pauses and cuts off workers and routers in turn. Every
answer is compared with an undisturbed one: ids, text, log probabilities' tokens and ends. The second drains one of
two workers with the demonstration model, on the CPU, in the middle of its answers, and counts what was computed
again. The third changes a worker's role again and again.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from support.clients.scraping import scrape
from support.cluster.fleet import Fleet, FleetPlan, Node, fleet
from support.faults.lost_routers import Report, Streams, request_kinds
from support.servers.etcd import EtcdServer

from baton import AsyncClient
from baton.errors import BatonError
from baton.inference.v1 import generate_pb2

_SIMULATED = "engine={kind: simulated, name: demo, num_blocks: 65536, block_bytes: 1024, decode_step_seconds: 0.03}"
_EMBEDDED = "engine={kind: pytorch, model: models/demo, device: cpu, threads: 1, kv_cache_bytes: 256MiB}"
_ROUTER = ("probe={interval_seconds: 0.5, timeout_seconds: 3, hung_seconds: 4}", "drain_seconds=1")
_WORKER = ("handoff.lease_seconds=5", "drain_seconds=30")
_PROMPT = "Sort: pear apple mango " * 8


async def _keep_moving(routers: Sequence[Node], workers: Sequence[Node]) -> None:
    chosen = random.Random(1)
    clients = [AsyncClient(router.direct) for router in routers]
    while True:
        await asyncio.sleep(0.2)
        try:
            worker = chosen.choice(workers).name
            await chosen.choice(clients).move_streams(worker, streams=chosen.randrange(1, 5), timeout_seconds=1.0)
        except BatonError:
            continue  # it is away


async def _lose(number: int, routers: Sequence[Node], workers: Sequence[Node]) -> None:
    """Loses a process for a while: a worker three times of four, by each way in turn."""
    node = routers[number // 4 % 2] if number % 4 == 3 else workers[number % len(workers)]
    match number % 3:
        case 0:
            node.kill()
            node.start()
        case 1:
            node.pause()
            await asyncio.sleep(5.0)
            node.resume()
        case 2:
            await node.proxy.cut()
            await asyncio.sleep(1.0)
            await node.proxy.restore()
    await node.serving()


async def _move(moves: int, at_once: int, etcd: str, folder: Path) -> Report:
    plan = FleetPlan("moves", etcd, (_SIMULATED, *_WORKER), _ROUTER, prefill=1, decode=3, routers=2)
    async with fleet(plan, folder) as running:
        routers = [node for node in running.nodes.values() if node.role == "router"]
        workers = [node for node in running.nodes.values() if node.role == "decode"]
        streams = Streams([node.direct for node in routers], request_kinds(_PROMPT, 150), Report())
        await streams.learn()
        moving = asyncio.create_task(_keep_moving(routers, workers))

        async def lose() -> None:
            while streams.report.moves < moves:
                await asyncio.sleep(2.0)
                await _lose(streams.report.losses, routers, workers)
                streams.report.losses += 1

        try:
            await streams.run(at_once, lose)
        finally:
            moving.cancel()
        await _none_used(running)
        return streams.report


async def _change_roles(changes: int, at_once: int, etcd: str, folder: Path) -> str:
    plan = FleetPlan("roles", etcd, (_SIMULATED, *_WORKER), _ROUTER, prefill=2, decode=2, routers=2)
    async with fleet(plan, folder) as running:
        routers = [node.direct for node in running.nodes.values() if node.role == "router"]
        streams = Streams(routers, request_kinds(_PROMPT, 150), Report())
        await streams.learn()
        seconds: list[float] = []

        async def change() -> None:
            async with AsyncClient(routers[0]) as client:
                for number in range(changes):
                    began = time.monotonic()
                    await client.change_role("decode-1", ("prefill", "decode")[number % 2], timeout_seconds=30.0)
                    seconds.append(time.monotonic() - began)
                    await asyncio.sleep(0.2)

        await streams.run(at_once, change)
        await _none_used(running)
        for text in (streams.report.failed + streams.report.different)[:5]:
            print(text[:500])
        seconds.sort()
        return (
            f"{changes} changes of a role, p50 {seconds[changes // 2]:.2f} s, longest {seconds[-1]:.2f} s; "
            f"{streams.report.moves} moves, {streams.report}"
        )


async def _none_used(running: Fleet) -> None:
    ended = time.monotonic()
    while used := await running.blocks_used():
        if time.monotonic() - ended > 30.0:
            raise SystemExit(f"{used} blocks are still in use")
        await asyncio.sleep(0.2)
    print(f"0 blocks in use {time.monotonic() - ended:.1f} s after the last answer")


async def _drain(count: int, tokens: int, etcd: str, folder: Path) -> str:
    plan = FleetPlan("drain", etcd, (_EMBEDDED, *_WORKER), _ROUTER, prefill=0, decode=2, metrics=True)
    async with fleet(plan, folder) as running, AsyncClient(running.router.direct) as client:
        # Their salts differ, so that no cache has what is moved.
        undisturbed = await asyncio.gather(*(_answer(client, number, tokens, "before") for number in range(count)))
        streams = [asyncio.create_task(_answer(client, number, tokens, "drained")) for number in range(count)]
        # All to the one that is drained, as soon as they have begun.
        while sum([(await running.load(name)).running for name in ("decode-0", "decode-1")]) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        while (await running.load("decode-1")).running:
            await client.move_streams("decode-1")
            await asyncio.sleep(0.3)
        while await running.blocks_used() < count * tokens / 2 / 16:  # noqa: ASYNC110 - half of each, in blocks
            await asyncio.sleep(0.2)
        load = await running.load("decode-0")
        began = time.monotonic()
        await client.drain_worker("decode-0")
        seconds = time.monotonic() - began
        answers = [await one for one in streams]
        router = scrape(running.router.metrics)
        pause = router.sum("baton_router_move_pause_seconds_sum") / router.sum("baton_router_move_pause_seconds_count")
        recomputed = router.sum("baton_router_moves_total", outcome="recomputed")
        different = sum(answer[0] != whole[0] for answer, whole in zip(answers, undisturbed, strict=True))
        moved, failed = sum(answer[1] for answer in answers), sum(answer[2] for answer in answers)
        return (
            f"decode-0 had {load.running} of {count} streams of {tokens} tokens, {load.blocks_used} blocks: drained in "
            f"{seconds:.2f} s; {moved} moved, {recomputed:.0f} computed again, {failed} failed over, "
            f"{different} different; mean pause {pause * 1e3:.0f} ms"
        )


async def _answer(client: AsyncClient, number: int, tokens: int, salt: str) -> tuple[list[int], int, int]:
    request = generate_pb2.GenerateRequest(prompt=f"{number}: a story")
    request.sampling.temperature, request.sampling.seed, request.routing.cache_salt = 0.8, number, salt
    request.stopping.max_tokens, request.stopping.ignore_eos = tokens, True
    ids: list[int] = []
    async with client.generate(request) as events:
        async for event in events:
            ids += event.token.token_ids
            if event.HasField("finished"):
                return ids, event.finished.moves, event.finished.migrations
    raise AssertionError("an answer has no end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--roles", type=int, default=0)
    parser.add_argument("--drain", action="store_true")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2000)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        etcd, began = EtcdServer(Path(folder) / "etcd"), time.monotonic()
        etcd.start()
        try:
            if arguments.roles:
                print(asyncio.run(_change_roles(arguments.roles, arguments.at_once, etcd.endpoint, Path(folder))))
                return
            if arguments.drain:
                print(asyncio.run(_drain(arguments.streams, arguments.tokens, etcd.endpoint, Path(folder))))
                return
            report = asyncio.run(_move(arguments.moves, arguments.at_once, etcd.endpoint, Path(folder)))
        finally:
            etcd.stop()
    print(f"{report.moves} moves, {report}; {time.monotonic() - began:.0f} s")
    for text in (report.failed + report.different)[:5]:
        print(text[:500])


if __name__ == "__main__":
    main()
