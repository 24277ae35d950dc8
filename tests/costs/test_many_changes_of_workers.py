"""Many workers that change at once cost a router time by their number, not by its square."""

import asyncio
from dataclasses import replace

from support.growth import growth
from support.router.worker_views import worker

from router.config import ProbeConfig
from router.workers import members
from router.workers.cluster import Cluster
from rpc.channels import dialer
from runtime.aio import TaskGroup

_PROBE = ProbeConfig(interval_seconds=60)


async def test_the_changes_of_a_thousand_workers_at_once_are_looked_at_together() -> None:
    async with TaskGroup() as group:
        clusters = {}
        for size in (100, 1000):
            clusters[size] = Cluster(group, _PROBE, dialer(None))
            clusters[size]._update([replace(worker(f"w{number}"), address="127.0.0.1:1") for number in range(size)])

        def change_all(size: int) -> None:
            for _ in range(size):
                clusters[size]._refresh()

        try:
            assert growth(change_all, [100, 1000]) < 30
        finally:
            for one in clusters.values():
                one.close()


async def test_more_workers_than_any_fleet_has_are_not_watched_and_those_that_are_known_stay(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(members, "_MOST_WORKERS", 5)
    async with TaskGroup() as group:
        watched = Cluster(group, _PROBE, dialer(None))
        records = [replace(worker(f"w{number}"), address="127.0.0.1:1") for number in range(20)]
        watched._update(records[10:13])
        watched._update(records)
        names = {record.worker_id for record in watched._members.records}
        assert {"w10", "w11", "w12"} < names
        assert len(names) == 5
        watched.close()
        await asyncio.sleep(0)
