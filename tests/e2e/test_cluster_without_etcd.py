"""Prefill, decode and a router in processes that find each other in a shared folder."""

import uuid
from pathlib import Path

from support.cluster.fleet import Fleet, FleetPlan, fleet
from support.faults.outcomes import Outcome, follow
from support.servers.etcd import free_port

from baton.inference.v1 import generate_pb2 as pb

ENGINE = "engine={kind: simulated, name: demo, num_blocks: 256, block_bytes: 64}"


async def test_requests_are_served_and_a_killed_worker_leaves(tmp_path: Path) -> None:
    registry = f"registry={{kind: file, folder: {tmp_path / 'registry'}, lease_ttl_seconds: 2, poll_seconds: 0.05}}"
    no_etcd = f"127.0.0.1:{free_port()}"
    plan = FleetPlan("without-etcd", no_etcd, (ENGINE, registry), (registry,), prefill=2, decode=1)
    async with fleet(plan, tmp_path) as running:
        before = await answer(running)
        running.nodes.pop("prefill-0").kill()
        assert (await answer(running)).ids == before.ids
        await running.ready()  # the router lists exactly the workers that are left


async def answer(running: Fleet) -> Outcome:
    """The answer to one request, which two workers served."""
    request = pb.GenerateRequest(request_id=uuid.uuid4().hex, prompt="some words to be answered")
    request.sampling.seed = 1
    request.stopping.max_tokens = 6
    outcome = Outcome(request.request_id)
    await follow(running.stub.Generate(request, timeout=60), outcome)
    assert outcome.is_right, outcome
    assert len(outcome.ids) == 6
    assert outcome.finished is not None
    assert outcome.finished.topology == pb.TOPOLOGY_DISAGGREGATED
    return outcome
