"""Every process of a fleet is ended by SIGTERM and started again, under load: no client notices."""

import asyncio
import os
from pathlib import Path

import pytest
from support.cluster.fleet import Fleet, FleetPlan, fleet
from support.eventually import eventually
from support.faults.load import load
from support.servers.etcd import EtcdServer

FULL = os.environ.get("BATON_FAULTS") == "full"
ENGINE = "engine={kind: simulated, name: demo, num_blocks: 2048, block_bytes: 1024, decode_step_seconds: 0.02}"
# Long enough for what runs, or so short that it has to go on elsewhere.
DRAINS = [
    pytest.param(0.3, id="short"),
    pytest.param(10.0, id="long", marks=pytest.mark.skipif(not FULL, reason="takes long")),
]
ROUTER = ("probe={interval_seconds: 0.3, timeout_seconds: 1.0}", "drain_seconds=20", "retry.budget_floor=1000")


async def restart(fleet: Fleet, name: str) -> int:
    """Its exit code. Returns when the routers send work to the new process."""
    node = fleet.nodes[name]
    exit_code = await node.terminate()
    node.start()
    await node.serving()
    await fleet.ready()
    return exit_code


@pytest.mark.timeout(240)
@pytest.mark.parametrize("drain_seconds", DRAINS)
async def test_a_rolling_restart_under_load_costs_no_request(
    drain_seconds: float, shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    worker = (ENGINE, "handoff.lease_seconds=1", f"drain_seconds={drain_seconds}")
    plan = FleetPlan(f"rolling-{drain_seconds}", shared_etcd.endpoint, worker, ROUTER, routers=2)
    async with fleet(plan, tmp_path) as running:
        async with load(running, at_once=4, max_tokens=60) as loading:
            await asyncio.sleep(0.5)
            exit_codes = {name: await restart(running, name) for name in running.nodes}
            await eventually(lambda: loading.right > 20)
        print(f"\nrolling restart: {loading.right} right, {loading.migrations} migrations, {loading.retries} retries")
        assert loading.wrong == []
        assert set(exit_codes.values()) == {0}, exit_codes
        assert await running.blocks_used() == 0
