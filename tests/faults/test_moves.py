"""Source, target and router of a move are killed, paused and cut off at each of its steps: no token is lost."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.cluster.fleet import Fleet, FleetPlan, Node, fleet
from support.faults.lost_routers import Report, Streams
from support.servers.etcd import EtcdServer

from baton.calls import stream, unary
from baton.errors import BatonError
from baton.inference.v1 import cluster_service_pb2, generate_pb2

_ENGINE = (
    "engine={kind: simulated, name: demo, num_blocks: 4096, block_bytes: 1024, decode_step_seconds: 0.01,"
    " allow_faults: true}"
)
_WORKER = (_ENGINE, "handoff.lease_seconds=3", "drain_seconds=10")
_ROUTER = (
    "probe={interval_seconds: 0.3, timeout_seconds: 1.0, hung_seconds: 1.5}",
    "allow_faults=true",
    "drain_seconds=1",
)
_REQUEST = generate_pb2.GenerateRequest(
    prompt="Sort: pear apple mango " * 6,
    sampling={"temperature": 0.8, "seed": 11},  # type: ignore[arg-type]
    stopping={"max_tokens": 250, "ignore_eos": True},  # type: ignore[arg-type]
)

_FULL = os.environ.get("BATON_FAULTS") == "full"
# The source has the first decode, the target the second one. A delay holds the move at a step while a process is lost.
_KILLED = ["crash@yield", "crash@warm;attempt=2", "crash@pull;attempt=2"]
_HELD = [("paused", "delay=0.7@pull;attempt=2"), ("cut", "delay=0.7@warm;attempt=2")]
_MOVES = 12
if _FULL:
    _KILLED += [
        "crash@lend",
        "crash@queue;role=decode;attempt=2",
        "crash@reserve;attempt=2",
        "crash@confirm;attempt=2",
        "crash@decode:150;attempt=2",
    ]
    _STEPS = ("lend", "yield", "warm;attempt=2", "reserve;attempt=2", "pull;attempt=2")
    _HELD = [(how, f"delay=0.7@{step}") for how in ("paused", "cut") for step in _STEPS]
    _MOVES = 24


async def _answer(running: Fleet, plan: str) -> tuple[list[int], generate_pb2.Finished]:
    metadata = [("x-baton-fault", plan)] if plan else []
    ids: list[int] = []
    async for message in stream(running.stub.Generate(_REQUEST, timeout=60.0, metadata=metadata)):
        ids += message.token.token_ids
        finished = message.finished
    return ids, finished


async def _source(running: Fleet) -> Node:
    while True:
        for node in running.workers:
            if (await running.load(node.name)).running:
                return node
        await asyncio.sleep(0.02)


async def _move(running: Fleet, source: Node) -> None:
    await asyncio.sleep(0.3)
    request = cluster_service_pb2.MoveStreamsRequest(worker_id=source.name)
    await unary(running.operators.MoveStreams(request, timeout=10.0))


async def _restored(running: Fleet) -> None:
    """Starts what was killed, and waits until no block is in use."""
    for node in running.workers:
        node.resume() if node.is_alive else node.start()
        await node.proxy.restore()
        await node.serving()
    await running.ready()
    for _ in range(150):
        if await running.blocks_used() == 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{await running.blocks_used()} blocks are in use")


@asynccontextmanager
async def _fleet(etcd: EtcdServer, folder: Path, name: str, routers: int = 1) -> AsyncIterator[Fleet]:
    plan = FleetPlan(name, etcd.endpoint, _WORKER, _ROUTER, prefill=0, decode=3, routers=routers)
    async with fleet(plan, folder) as running:
        yield running


@pytest.mark.timeout(240)
async def test_a_process_that_is_killed_at_any_step_of_a_move_costs_no_token(
    shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    async with _fleet(shared_etcd, tmp_path, "moves-killed") as running:
        expected, _ = await _answer(running, "")
        for plan in _KILLED:
            answer = asyncio.ensure_future(_answer(running, plan))
            await _move(running, await _source(running))
            ids, finished = await answer
            print(f"{plan}: {finished.moves} moves, {finished.migrations} migrations")
            assert ids == expected, plan
            assert not all(node.is_alive for node in running.workers), plan
            await _restored(running)


@pytest.mark.timeout(480 if _FULL else 240)
async def test_a_process_that_is_paused_or_cut_off_during_a_move_costs_no_token(
    shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    async with _fleet(shared_etcd, tmp_path, "moves-held") as running:
        expected, _ = await _answer(running, "")
        for how, plan in _HELD:
            for who in ("source", "others"):
                answer = asyncio.ensure_future(_answer(running, plan))
                source = await _source(running)
                await _move(running, source)
                await asyncio.sleep(0.3)
                lost = [node for node in running.workers if (node is source) == (who == "source")]
                for node in lost:
                    node.pause() if how == "paused" else await node.proxy.cut()
                await asyncio.sleep(3.0)
                for node in lost:
                    node.resume()
                    await node.proxy.restore()
                ids, finished = await answer
                print(f"{plan}, {who} {how}: {finished.moves} moves, {finished.migrations} migrations")
                assert ids == expected, (how, plan, who)
                await _restored(running)


@pytest.mark.timeout(300)
async def test_routers_that_are_killed_while_streams_move_lose_none(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    async with _fleet(shared_etcd, tmp_path, "moves-routers", routers=2) as running:
        routers = [node for node in running.nodes.values() if node.role == "router"]
        streams = Streams([node.direct for node in routers], {"seeded": _REQUEST}, Report())
        await streams.learn()

        async def lose() -> None:
            for number in range(_MOVES):
                await asyncio.sleep(0.4)
                moved = running.workers[number % 3]
                try:
                    await _move(running, moved)
                except BatonError:
                    continue  # the router that was asked is away
                if number % 6 == 5:
                    streams.report.losses += 1
                    routers[number // 6 % 2].kill()
                    routers[number // 6 % 2].start()

        await streams.run(8, lose)
        print(f"\n{streams.report.moves} moves, {streams.report}")
        assert (streams.report.failed, streams.report.different) == ([], [])
        assert streams.report.moves > _MOVES / 3
        await _restored(running)
