"""A host whose clock steps back while its workers are restarted one by one."""

import time
from dataclasses import replace

from support.eventually import eventually
from support.router.worker_views import Views, worker
from support.servers.etcd import EtcdServer

from discovery.etcd import EtcdConfig, EtcdRegistry
from services.config import WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker


async def test_the_new_process_stays_registered_beside_one_from_before_the_clock_stepped_back(
    shared_etcd: EtcdServer,
) -> None:
    config = EtcdConfig(endpoints=(shared_etcd.endpoint,))
    before = replace(worker("w1"), epoch=time.time_ns() + 3600 * 10**9)
    starting = WorkerConfig(worker_id="w1", engine=SimulatedConfig(num_blocks=8), drain_seconds=0)
    async with (
        EtcdRegistry(config, "stepping-back", lease_ttl_seconds=2) as old,
        EtcdRegistry(config, "stepping-back", lease_ttl_seconds=2) as new,
        old.register(before) as leaving,
        host_worker(starting, new) as running,
        Views(new) as views,
    ):
        await views.until(lambda records: [one.address for one in records] == [running.address])
        # It reads the key at each renewal, and writes it again if the key has an older value.
        await eventually(lambda: not leaving.registered)
        assert [one.address for one in views.all[-1]] == [running.address]
