"""Streams that are silent for minutes, and connections on which nothing moves for an hour, work as before."""

import asyncio
import os
import time
import uuid
from pathlib import Path

import pytest
from grpc import aio
from support.cluster.fleet import Fleet, FleetPlan, fleet
from support.faults.outcomes import Outcome, follow
from support.servers.etcd import EtcdServer

from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub

FULL = os.environ.get("BATON_FAULTS") == "full"
SILENT_SECONDS = 300.0
IDLE_SECONDS = 3600.0
WORKER = (
    "engine={kind: simulated, name: demo, allow_faults: true, num_blocks: 1024, block_bytes: 1024}",
    "drain_seconds=1",
)
ROUTER = ("allow_faults=true", "drain_seconds=1")
SILENCES = {
    "before the first token": f"delay={SILENT_SECONDS}@prefill",
    "in the middle": f"delay={SILENT_SECONDS}@decode:7",
}


def request() -> pb.GenerateRequest:
    asked = pb.GenerateRequest(prompt="one and the same prompt")
    asked.sampling.seed = 3
    asked.stopping.max_tokens = 40
    asked.stopping.ignore_eos = True
    asked.routing.cache_salt = uuid.uuid4().hex
    return asked


async def run(stub: InferenceServiceStub, name: str, plan: str = "") -> Outcome:
    outcome = Outcome(name)
    metadata = (("x-baton-fault", plan),) if plan else ()
    await follow(stub.Generate(request(), timeout=SILENT_SECONDS + 60, metadata=metadata), outcome)
    return outcome


def resident_bytes(fleet: Fleet) -> dict[str, int]:
    return {node.name: node.resident_bytes() for node in fleet.nodes.values()}


@pytest.mark.skipif(not FULL, reason="takes more than an hour")
@pytest.mark.timeout(SILENT_SECONDS + IDLE_SECONDS + 300)
async def test_silent_streams_and_an_idle_hour_do_no_harm(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    plan = FleetPlan("long-waits", shared_etcd.endpoint, WORKER, ROUTER, prefill=1, decode=1)
    # The second client is one with gRPC's own settings, as most languages' are: without pings.
    async with fleet(plan, tmp_path) as running, aio.insecure_channel(running.nodes["router-0"].proxy.address) as plain:
        stubs = {"our channel": running.stub, "a plain channel": InferenceServiceStub(plain)}
        undisturbed = await run(running.stub, "undisturbed")
        silent = await asyncio.gather(
            *(run(stub, f"{client}, {when}", plan) for client, stub in stubs.items() for when, plan in SILENCES.items())
        )
        for outcome in silent:
            assert outcome.is_right, outcome
            assert outcome.ids == undisturbed.ids
            assert outcome.seconds > SILENT_SECONDS
        assert await running.blocks_used() == 0
        before = resident_bytes(running)
        await asyncio.sleep(IDLE_SECONDS)
        for name, stub in stubs.items():
            started = time.monotonic()
            outcome = await run(stub, name)
            assert outcome.is_right, outcome
            assert outcome.ids == undisturbed.ids
            print(f"\n{name}: a request after {IDLE_SECONDS:.0f} s of nothing took {time.monotonic() - started:.3f} s")
        grown = {name: now - before[name] for name, now in resident_bytes(running).items()}
        print(f"resident memory grew by {max(grown.values()) / 1e6:.1f} MB at most")
        assert max(grown.values()) < 20e6, grown
        assert await running.blocks_used() == 0
