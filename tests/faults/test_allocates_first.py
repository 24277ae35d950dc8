"""Kills the processes of an engine whose decode side allocates before the prompt is computed: docs/extending.md."""

import asyncio
import os
from pathlib import Path

import pytest
from support.cluster.fleet import Fleet, FleetPlan, fleet
from support.eventually import PATIENCE_SECONDS
from support.faults.trials import session_for
from support.servers.etcd import EtcdServer

from baton.inference.v1 import generate_pb2 as pb
from runtime.aio import timeout

LEASE_SECONDS = 5.0
# 20 blocks, so that a prompt is computed for 4 seconds.
IDS = tuple(range(1, 161)) * 2
ENGINE = "engine={kind: allocating_rooms, block_seconds: 0.2}"
# Requests go on elsewhere as soon as a probe has failed.
ROUTER = ("probe={interval_seconds: 0.3, timeout_seconds: 5}", "routing.session_slack=1000", "drain_seconds=1")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_side_that_is_killed_while_kv_is_sent_costs_no_answer(
    victim: str, shared_etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    worker = (ENGINE, f"handoff.lease_seconds={LEASE_SECONDS}", "drain_seconds=1")
    plan = FleetPlan(
        f"allocates-first-{victim}", shared_etcd.endpoint, worker, ROUTER, module="support.engines.allocating_rooms"
    )
    async with fleet(plan, tmp_path) as running:
        expected = await _answer(running, pb.TOPOLOGY_AGGREGATED)
        asking = asyncio.create_task(_answer(running, pb.TOPOLOGY_UNSPECIFIED))
        async with timeout(PATIENCE_SECONDS):
            while not await _holds(running, "prefill-0"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await running.load("decode-0")).blocks_used > 0
        running.nodes[victim].kill()
        assert await asking == expected
        async with timeout(PATIENCE_SECONDS):
            while not await _is_free(running):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def _answer(running: Fleet, topology: pb.Topology.ValueType) -> list[int]:
    request = pb.GenerateRequest()
    request.token_ids.ids.extend(IDS)
    request.stopping.max_tokens = 20
    request.stopping.ignore_eos = True
    request.routing.topology = topology
    request.routing.session_key = session_for("prefill-0", "decode-0")
    return [one async for message in running.stub.Generate(request, timeout=60) for one in message.token.token_ids]


async def _holds(running: Fleet, name: str) -> bool:
    return (await running.load(name)).blocks_used > 0


async def _is_free(running: Fleet) -> bool:
    alive = [node.name for node in running.workers if node.is_alive]
    return not any([await _holds(running, name) for name in alive])
