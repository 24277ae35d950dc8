"""Routers killed with SIGKILL, paused and killed together with a worker, under running streams: nothing is lost."""

import asyncio
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from support.cluster.fleet import Fleet, FleetPlan, Node, fleet
from support.faults.kept_requests import BODIES, any_requests, embedded_requests, embedded_worker, paced_requests
from support.faults.lost_routers import EventSources, Report, Streams
from support.sampled import sampled
from support.servers.etcd import EtcdServer

_SIMULATED = "engine={kind: simulated, name: demo, num_blocks: 4096, block_bytes: 1024, decode_step_seconds: 0.01}"
# Losses, each a second after the one before: a few in a sample.
_FULL = os.environ.get("BATON_FAULTS") == "full"
_LOSSES = 24 if _FULL else 3
_ROUTER = ("probe={interval_seconds: 0.3, timeout_seconds: 1.5, hung_seconds: 3}", "drain_seconds=1")


async def _orphans_end(running: Fleet) -> None:
    async def none_used() -> bool:
        return await running.blocks_used() == 0

    for _ in range(240):
        if await none_used():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{await running.blocks_used()} blocks are in use")


async def _lose_in_turn(routers: Sequence[Node], report: Report) -> None:
    """Kills one router and the other, and pauses every third time."""
    for number in range(_LOSSES):
        await asyncio.sleep(1.0)
        report.losses += 1
        router = routers[number % 2]
        if number % 3 == 2:
            router.pause()
            await asyncio.sleep(4.0)
            router.resume()
        else:
            router.kill()
            router.start()
            await router.serving()
    await asyncio.sleep(1.0)


@pytest.mark.timeout(500 if _FULL else 300)
async def test_clients_of_openais_streams_lose_nothing_either(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    worker = (_SIMULATED, "handoff.lease_seconds=2", "drain_seconds=1")
    plan = FleetPlan("lost-sse", shared_etcd.endpoint, worker, _ROUTER, prefill=1, decode=2, routers=2, openai=True)
    async with fleet(plan, tmp_path) as running:
        routers = [node for node in running.nodes.values() if node.role == "router"]
        sources = EventSources([node.openai for node in routers], BODIES)
        await sources.learn()
        await sources.run(8, partial(_lose_in_turn, routers, sources.report))
        print(f"\nserver-sent events: {sources.report}")
        assert (sources.report.failed, sources.report.different) == ([], [])
        assert sources.report.resumed > 3
        await _orphans_end(running)


@pytest.mark.timeout(500 if _FULL else 300)
@pytest.mark.parametrize("engine", sampled(["simulated", "embedded"], ["simulated"]))
async def test_routers_that_are_killed_and_paused_lose_no_stream(
    engine: str, shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    is_embedded = engine == "embedded"
    worker = ("handoff.lease_seconds=2", "drain_seconds=1")
    worker = (*(embedded_worker(tmp_path) if is_embedded else [_SIMULATED]), *worker)
    encode = int(is_embedded)
    plan = FleetPlan(
        f"lost-{engine}", shared_etcd.endpoint, worker, _ROUTER, encode=encode, prefill=1, decode=2, routers=2
    )
    async with fleet(plan, tmp_path) as running:
        routers = [node for node in running.nodes.values() if node.role == "router"]
        requests = {**any_requests(), **paced_requests(), **(embedded_requests() if is_embedded else {})}
        streams = Streams([node.direct for node in routers], requests, Report())
        await streams.learn()

        await streams.run(8, partial(_lose_in_turn, routers, streams.report))
        report = streams.report
        print(f"\n{engine}: {report}")
        assert (report.failed, report.different) == ([], [])
        assert report.resumed > 3
        await _orphans_end(running)


@pytest.mark.timeout(500 if _FULL else 300)
async def test_a_router_and_a_worker_killed_together_lose_no_stream(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    worker = (_SIMULATED, "handoff.lease_seconds=2", "drain_seconds=1")
    plan = FleetPlan("lost-both", shared_etcd.endpoint, worker, _ROUTER, prefill=1, decode=2, routers=2)
    async with fleet(plan, tmp_path) as running:
        routers = [node for node in running.nodes.values() if node.role == "router"]
        streams = Streams([node.direct for node in routers], {**any_requests(), **paced_requests()}, Report())
        await streams.learn()

        async def lose() -> None:
            await asyncio.sleep(1.0)
            streams.report.losses += 1
            # At one moment: a router that outlives the worker goes on elsewhere, and is then adopted.
            for lost in (running.nodes["decode-1"], routers[0]):
                lost.signal(signal.SIGKILL)
            for lost in (running.nodes["decode-1"], routers[0]):
                lost.kill()
            await asyncio.sleep(6.0)
            running.nodes["decode-1"].start()
            routers[0].start()
            await running.nodes["decode-1"].serving()

        await streams.run(6, lose)
        report = streams.report
        print(f"\nrouter and worker: {report}")
        assert (report.failed, report.different) == ([], [])
        assert report.recomputed > 0
        await _orphans_end(running)
