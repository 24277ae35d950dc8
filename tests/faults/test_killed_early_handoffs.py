"""Kills the processes of a handoff that has begun, while its prompt is computed."""

import asyncio
from pathlib import Path

import pytest
from support.cluster.fleet import Fleet, FleetPlan, fleet
from support.eventually import PATIENCE_SECONDS
from support.faults.trials import session_for
from support.servers.etcd import EtcdServer

from baton.inference.v1 import generate_pb2 as pb
from runtime.aio import timeout

# 20 steps, in which a prompt is computed for 5 seconds.
IDS = tuple(index % 200 for index in range(20 * 64))
ENGINE = (
    "engine={kind: simulated, name: demo, num_blocks: 4096, block_bytes: 1024, "
    "prefill_tokens_per_second: 256, prefill_chunk_tokens: 64}"
)
WORKER = (ENGINE, "handoff.lease_seconds=5", "drain_seconds=1")
# Requests go on elsewhere as soon as a probe has failed.
ROUTER = (
    "probe={interval_seconds: 0.3, timeout_seconds: 5}",
    "routing={session_slack: 1000, early_handoff_tokens: 512}",
    "drain_seconds=1",
)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_side_that_is_killed_while_the_prompt_is_computed_costs_no_answer(
    victim: str, transport: str, shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    worker = (*WORKER, f"transports=[{transport}]")
    plan = FleetPlan(f"early-{victim}-{transport}", shared_etcd.endpoint, worker, ROUTER)
    async with fleet(plan, tmp_path) as running:
        expected = await _answer(running, pb.TOPOLOGY_AGGREGATED)
        asking = asyncio.create_task(_answer(running, pb.TOPOLOGY_UNSPECIFIED))
        async with timeout(PATIENCE_SECONDS):
            # It reads before the first token: blocks are in use on the side that decodes.
            while not await _uses(running, "decode-0"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert await _uses(running, "prefill-0")
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
    request.sampling.seed = 5
    request.routing.topology = topology
    request.routing.session_key = session_for("prefill-0", "decode-0")
    request.routing.cache_salt = pb.Topology.Name(topology)
    return [one async for message in running.stub.Generate(request, timeout=60) for one in message.token.token_ids]


async def _uses(running: Fleet, name: str) -> bool:
    return (await running.load(name)).blocks_used > 0


async def _is_free(running: Fleet) -> bool:
    alive = [node.name for node in running.workers if node.is_alive]
    return not any([await _uses(running, name) for name in alive])
