"""Streams of five minutes through Envoy: one with a message each second, and a silent one."""

import os
import uuid
from pathlib import Path

import pytest
from grpc import aio
from support.cluster.fleet import FleetPlan, fleet
from support.faults.outcomes import Outcome, follow
from support.servers.envoy import running_envoy
from support.servers.etcd import EtcdServer

from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub

FULL = os.environ.get("BATON_FAULTS") == "full"
SECONDS = 300
ENGINE = "engine={kind: simulated, name: demo, num_blocks: 1024, block_bytes: 64"
STEADY = f"{ENGINE}, decode_step_seconds: 1.0}}"
SILENT = f"{ENGINE}, prefill_base_seconds: {SECONDS}.0}}"


def request(max_tokens: int) -> pb.GenerateRequest:
    asked = pb.GenerateRequest(prompt="hello")
    asked.stopping.max_tokens = max_tokens
    asked.stopping.ignore_eos = True
    asked.routing.cache_salt = uuid.uuid4().hex
    return asked


@pytest.mark.skipif(not FULL, reason="takes five minutes")
@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize(("engine", "max_tokens"), [(STEADY, SECONDS), (SILENT, 2)], ids=["steady", "silent"])
async def test_a_stream_of_five_minutes_passes_envoy(
    engine: str, max_tokens: int, shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    plan = FleetPlan(
        f"long-{max_tokens}", shared_etcd.endpoint, (engine, "drain_seconds=1"), prefill=1, decode=1, routers=2
    )
    async with fleet(plan, tmp_path) as running:
        routers = [node.direct for node in running.nodes.values() if node.role == "router"]
        async with running_envoy(tmp_path, routers) as envoy, aio.insecure_channel(envoy.address) as channel:
            outcome = Outcome("long")
            # Without a deadline, as a client might: no process on the way has a shorter one than the router.
            await follow(InferenceServiceStub(channel).Generate(request(max_tokens)), outcome)
    assert outcome.is_right, outcome
    assert len(outcome.ids) == max_tokens
    assert outcome.seconds >= SECONDS - 2
    print(f"\n{max_tokens} tokens in {outcome.seconds:.0f} s")
