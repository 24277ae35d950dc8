"""etcd is killed, frozen, and loses its data, under load: no request fails, no process ends, all register again."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.cluster.fleet import Fleet, FleetPlan, fleet
from support.faults.load import Load, load
from support.router.worker_views import Views
from support.servers.etcd import EtcdServer, start_cluster

from discovery.etcd.config import EtcdConfig
from discovery.etcd.registry import EtcdRegistry

FULL = os.environ.get("BATON_FAULTS") == "full"
AWAY_SECONDS = 60.0 if FULL else 10.0
REGISTERED_AGAIN_SECONDS = 10.0
ENGINE = "engine={kind: simulated, name: demo, num_blocks: 2048, block_bytes: 1024, decode_step_seconds: 0.02}"


async def until_registered(etcd: EtcdServer, namespace: str, fleet: Fleet) -> float:
    """The time until every worker was in the registry."""
    started = time.monotonic()
    async with (
        EtcdRegistry(EtcdConfig(endpoints=(etcd.endpoint,)), namespace, 10.0) as registry,
        Views(registry) as views,
    ):
        await views.until_ids(*sorted(node.name for node in fleet.workers), seconds=REGISTERED_AGAIN_SECONDS)
    return time.monotonic() - started


@asynccontextmanager
async def undisturbed(running: Fleet) -> AsyncIterator[Load]:
    """A load none of whose requests may fail, and processes none of which may end."""
    async with load(running, at_once=3, max_tokens=40) as loading:
        yield loading
    assert loading.wrong == []
    assert loading.retries == 0
    assert all(node.is_alive for node in running.nodes.values())
    assert await running.blocks_used() == 0


@pytest.mark.timeout(300)
async def test_etcd_may_go_come_back_and_forget(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path / "etcd")
    etcd.start()
    plan = FleetPlan(
        "away", etcd.endpoint, (ENGINE, "handoff.lease_seconds=1", "drain_seconds=1"), ("drain_seconds=1",)
    )
    try:
        async with fleet(plan, tmp_path) as running:
            async with undisturbed(running) as loading:
                etcd.kill()
                await asyncio.sleep(AWAY_SECONDS)
                await asyncio.to_thread(etcd.start)
                after_death = await until_registered(etcd, "away", running)
            async with undisturbed(running):
                await asyncio.to_thread(etcd.stop)
                etcd.wipe()
                await asyncio.sleep(1)
                await asyncio.to_thread(etcd.start)
                after_loss = await until_registered(etcd, "away", running)
            async with undisturbed(running):
                etcd.pause()
                await asyncio.sleep(5)
                etcd.resume()
                after_pause = await until_registered(etcd, "away", running)
            await running.ready()
        print(
            f"\netcd away for {AWAY_SECONDS:.0f} s: {loading.right} requests, all right; "
            f"registered again {after_death:.1f} s after its return, {after_loss:.1f} s after it was wiped, "
            f"{after_pause:.1f} s after it hung"
        )
    finally:
        etcd.kill()


@pytest.mark.skipif(not FULL, reason="takes a minute")
@pytest.mark.timeout(300)
async def test_one_of_three_members_may_die_or_hang(tmp_path: Path) -> None:
    members = await asyncio.to_thread(start_cluster, tmp_path, 3)
    endpoints = ",".join(member.endpoint for member in members)
    plan = FleetPlan("three", endpoints, (ENGINE, "handoff.lease_seconds=1", "drain_seconds=1"), ("drain_seconds=1",))
    lasted = {}
    try:
        async with fleet(plan, tmp_path) as running:
            for member in members:
                async with undisturbed(running):
                    member.kill()
                    lasted[f"{member.name} dead"] = await restarted(running, "decode-0")
                    await asyncio.to_thread(member.start)
                async with undisturbed(running):
                    member.pause()
                    await asyncio.sleep(15)  # Longer than a lease of a registration.
                    lasted[f"{member.name} hung"] = await restarted(running, "decode-0")
                    member.resume()
        print("\none of three members of etcd, and a worker that comes back is used after: ", end="")
        print(", ".join(f"{what} {seconds:.1f} s" for what, seconds in lasted.items()))
    finally:
        for member in members:
            member.kill()


async def restarted(fleet: Fleet, name: str) -> float:
    """The time until a worker that was ended and started again was sent work."""
    node = fleet.nodes[name]
    assert await node.terminate() == 0
    started = time.monotonic()
    node.start()
    await node.serving()
    await fleet.ready()
    return time.monotonic() - started
