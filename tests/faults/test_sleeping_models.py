"""Two models of which one fits at a time, in processes that are killed awake, asleep, and while they wake."""

import asyncio
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.cluster.fleet import Fleet, fleet
from support.faults.kept_requests import any_requests
from support.faults.killed_workers import Killer, plan
from support.faults.lost_routers import Report, Streams
from support.sampled import sampled
from support.servers.etcd import EtcdServer

from baton.inference.v1 import generate_pb2

_FULL = os.environ.get("BATON_FAULTS") == "full"
_KILLS = 40 if _FULL else 3
_MODELS = {"decode-0": "first", "decode-1": "second"}


def _requests() -> dict[str, generate_pb2.GenerateRequest]:
    """For both models, which answer alike."""
    asked = {}
    for model in _MODELS.values():
        for kind, request in any_requests(60).items():
            own = generate_pb2.GenerateRequest()
            own.CopyFrom(request)
            own.model = model
            asked[f"{kind} of {model}"] = own
    return asked


async def _one_sleeps_and_none_has_blocks(running: Fleet) -> None:
    async with asyncio.timeout(60):
        while True:
            loads = [await running.load(name) for name in _MODELS]
            if sum(load.HasField("wake") for load in loads) == 1 and not any(load.blocks_used for load in loads):
                return
            await asyncio.sleep(0.1)


@pytest.mark.timeout(3000 if _FULL else 400)
@pytest.mark.parametrize(
    "routers", sampled([False, True], [False], lambda routers: "workers-and-routers" if routers else "workers")
)
async def test_models_that_take_turns_lose_no_stream_when_their_processes_are_killed(
    routers: bool, shared_etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    two = plan(f"asleep-{routers}".lower(), shared_etcd.endpoint, "one")
    sleep = f"sleep={{group: {tmp_path}/group, group_bytes: 3, bytes: 2, turn_seconds: 0.5}}"
    names = {name: [f"engine.name={model}"] for name, model in _MODELS.items()}
    async with fleet(replace(two, decode=2, worker=[*two.worker, sleep], of_one=names), tmp_path) as running:
        addresses = [node.direct for node in running.nodes.values() if node.role == "router"]
        streams = Streams(addresses, _requests(), Report(), stall_seconds=30.0)
        await streams.learn()
        killer = Killer(running, streams)
        await streams.run(6, partial(killer.kill, _KILLS, routers=routers, upgrades=None))
        print(f"\n{killer.report}; {streams.report}")
        assert (streams.report.failed, streams.report.different) == ([], [])
        # A new request is refused while no process serves its model, as without sleep, or while its router is gone.
        typed = ("NO_WORKER", *(("WORKER_UNAVAILABLE", "ROUTER_STARTING") if routers else ()))
        assert [refused for refused in streams.report.refused if not any(each in refused for each in typed)] == []
        assert killer.report.recovered["damaged"] == 0
        await _one_sleeps_and_none_has_blocks(running)
