"""Workers with keepers that are killed again and again, alone and with a router: no stream fails or differs."""

import asyncio
import os
from functools import partial
from pathlib import Path

import pytest
from support.cluster.fleet import Fleet, fleet
from support.faults.kept_requests import any_requests, paced_requests
from support.faults.killed_workers import Killer, Shape, plan
from support.faults.lost_routers import Report, Streams
from support.sampled import sampled
from support.servers.etcd import EtcdServer

_FULL = os.environ.get("BATON_FAULTS") == "full"
_KILLS = 60 if _FULL else 3
_UPGRADES = 20 if _FULL else 2
# The workers, and whether routers are killed, too.
_CASES: list[tuple[Shape, bool]] = [("one", False), ("one", True), ("apart", False), ("apart", True)]


def _name(case: tuple[Shape, bool]) -> str:
    return f"{case[0]}-workers" + ("-and-routers" if case[1] else "")


async def _no_blocks_are_used(running: Fleet) -> None:
    async with asyncio.timeout(60):
        while await running.blocks_used():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.timeout(3000 if _FULL else 400)
@pytest.mark.parametrize("case", sampled(_CASES, [("apart", True)], _name))
async def test_workers_that_are_killed_lose_no_stream(
    case: tuple[Shape, bool], shared_etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    shape, routers = case
    name = f"killed-{shape}-{routers}".lower()
    async with fleet(plan(name, shared_etcd.endpoint, shape), tmp_path) as running:
        addresses = [node.direct for node in running.nodes.values() if node.role == "router"]
        streams = Streams(addresses, {**any_requests(120), **paced_requests()}, Report(), stall_seconds=30.0)
        await streams.learn()
        killer = Killer(running, streams)
        await streams.run(6, partial(killer.kill, _KILLS, routers=routers))
        print(f"\n{killer.report}; {streams.report}")
        assert (streams.report.failed, streams.report.different) == ([], [])
        assert killer.report.recovered["whole"] > 0
        assert killer.report.recovered["damaged"] == 0
        await _no_blocks_are_used(running)


@pytest.mark.timeout(3000 if _FULL else 400)
async def test_upgrades_in_a_row_lose_no_stream(
    shared_etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    async with fleet(plan("upgraded", shared_etcd.endpoint, "one"), tmp_path) as running:
        addresses = [node.direct for node in running.nodes.values() if node.role == "router"]
        streams = Streams(addresses, {**any_requests(120), **paced_requests()}, Report(), stall_seconds=30.0)
        await streams.learn()
        killer = Killer(running, streams)
        await streams.run(6, partial(killer.upgrade, _UPGRADES))
        print(f"\n{killer.report}; {streams.report}")
        assert (streams.report.failed, streams.report.different) == ([], [])
        assert killer.report.upgrades == _UPGRADES
        assert killer.report.recovered["whole"] > 0
        assert killer.report.recovered["cut"] == killer.report.recovered["damaged"] == 0
        await _no_blocks_are_used(running)
