"""A registration in a real etcd heals itself, whatever happens to the lease, the key, or the server."""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from support.eventually import eventually
from support.router.worker_views import Views, worker
from support.servers.etcd import EtcdServer, free_port
from support.servers.tcp_proxy import TcpProxy

from baton.errors import Unavailable
from discovery.etcd import EtcdRegistry
from discovery.record import WorkerRecord
from runtime.aio import TaskGroup

OpenEtcd = Callable[..., AbstractAsyncContextManager[EtcdRegistry]]

# Of the registry in these tests: the shortest that etcd grants.
TTL_SECONDS = 2


def stored(server: EtcdServer, key: str) -> WorkerRecord | None:
    """The record that etcd has, as an outsider sees it."""
    value = server.control("get", "--print-value-only", key).strip()
    return WorkerRecord.from_json(value.encode()) if value else None


def lease_of(server: EtcdServer, key: str) -> str:
    """The id of a key's lease, as etcdctl wants it; empty if there is no key. Nothing is renewed meanwhile."""
    entries = json.loads(server.control("get", "--write-out=json", key)).get("kvs", [])
    return f"{entries[0]['lease']:x}" if entries else ""


@pytest.fixture
def key(namespace: str) -> str:
    return f"/baton/{namespace}/workers/w1"


async def test_the_record_is_json_under_the_namespaces_key(
    shared_etcd: EtcdServer, open_etcd: OpenEtcd, key: str
) -> None:
    async with open_etcd(shared_etcd.endpoint) as registry, registry.register(worker("w1")):
        assert stored(shared_etcd, key) == worker("w1")


async def test_the_lease_is_renewed(shared_etcd: EtcdServer, open_etcd: OpenEtcd, key: str) -> None:
    async with (
        open_etcd(shared_etcd.endpoint, ttl_seconds=5) as registry,
        registry.register(worker("w1")) as registration,
    ):
        begun, lease = time.monotonic(), lease_of(shared_etcd, key)
        await eventually(lambda: time.monotonic() - begun > 6)
        assert (registration.registered, lease_of(shared_etcd, key)) == (True, lease)


async def test_leaving_revokes_the_lease(shared_etcd: EtcdServer, open_etcd: OpenEtcd, key: str) -> None:
    async with open_etcd(shared_etcd.endpoint) as registry, registry.register(worker("w1")):
        lease = lease_of(shared_etcd, key)
    assert lease not in shared_etcd.control("lease", "list")


async def test_a_lease_revoked_by_an_outsider_is_replaced(
    shared_etcd: EtcdServer, open_etcd: OpenEtcd, key: str
) -> None:
    async with open_etcd(shared_etcd.endpoint) as registry, registry.register(worker("w1")) as registration:
        lease = lease_of(shared_etcd, key)
        shared_etcd.control("lease", "revoke", lease)
        await eventually(lambda: lease_of(shared_etcd, key) not in ("", lease))
        await eventually(lambda: registration.registered)  # etcd has the key before its answer is here


async def test_a_key_deleted_by_an_outsider_is_put_again(
    shared_etcd: EtcdServer, open_etcd: OpenEtcd, key: str
) -> None:
    async with open_etcd(shared_etcd.endpoint, ttl_seconds=15) as registry, registry.register(worker("w1")):
        lease = lease_of(shared_etcd, key)
        shared_etcd.control("del", key)
        await eventually(lambda: lease_of(shared_etcd, key) == lease)


async def test_a_record_overwritten_by_an_outsider_is_put_again(
    shared_etcd: EtcdServer, open_etcd: OpenEtcd, key: str
) -> None:
    async with open_etcd(shared_etcd.endpoint) as registry, registry.register(worker("w1")):
        shared_etcd.control("put", key, worker("w1", 0).to_json().decode())
        await eventually(lambda: stored(shared_etcd, key) == worker("w1"))


async def test_it_is_not_registered_once_the_lease_may_be_over(own_etcd: EtcdServer, open_etcd: OpenEtcd) -> None:
    async with open_etcd(own_etcd.endpoint) as registry, registry.register(worker("w1")) as registration:
        last_seen = frozen_at = time.monotonic()
        own_etcd.pause()
        while (now := time.monotonic()) and registration.registered:
            last_seen = now  # read before the question, so that a pause of this process proves nothing
            await asyncio.sleep(0.01)
        assert last_seen - frozen_at <= TTL_SECONDS
        own_etcd.resume()


async def test_it_registers_again_after_etcd_was_killed_and_restarted(
    own_etcd: EtcdServer, open_etcd: OpenEtcd, key: str
) -> None:
    async with open_etcd(own_etcd.endpoint) as registry, registry.register(worker("w1")) as registration:
        own_etcd.kill()
        await eventually(lambda: not registration.registered)
        own_etcd.start()
        await eventually(lambda: registration.registered)
        assert stored(own_etcd, key) == worker("w1")


async def test_it_registers_again_in_an_etcd_that_lost_its_data(
    own_etcd: EtcdServer, open_etcd: OpenEtcd, key: str
) -> None:
    async with open_etcd(own_etcd.endpoint) as registry, registry.register(worker("w1")) as registration:
        own_etcd.kill()
        own_etcd.wipe()
        own_etcd.start()
        await eventually(lambda: stored(own_etcd, key) == worker("w1"))
        await eventually(lambda: registration.registered)  # etcd has the key before its answer is here


async def test_an_update_while_etcd_is_away_is_written_when_it_is_back(
    own_etcd: EtcdServer, open_etcd: OpenEtcd, key: str
) -> None:
    draining = replace(worker("w1"), draining=True)
    async with open_etcd(own_etcd.endpoint) as registry, registry.register(worker("w1")) as registration:
        own_etcd.kill()
        await registration.update(draining)
        own_etcd.start()
        await eventually(lambda: stored(own_etcd, key) == draining)


async def test_leaving_does_not_wait_long_for_an_etcd_that_hangs(own_etcd: EtcdServer, open_etcd: OpenEtcd) -> None:
    async with open_etcd(own_etcd.endpoint) as registry:
        async with registry.register(worker("w1")):
            own_etcd.pause()
            left_at = time.monotonic()
        assert time.monotonic() - left_at < 10


async def test_entering_raises_unavailable_naming_the_endpoint_without_an_answer(open_etcd: OpenEtcd) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    async with open_etcd(endpoint, start_timeout_seconds=1.0) as registry:
        with pytest.raises(Unavailable, match=endpoint):
            async with registry.register(worker("w1")):
                pass


async def test_entering_waits_for_an_etcd_that_starts_later(tmp_path: Path, open_etcd: OpenEtcd) -> None:
    server = EtcdServer(tmp_path / "later")
    async with open_etcd(server.endpoint) as registry, TaskGroup() as group:
        group.create_task(asyncio.to_thread(server.start))
        async with registry.register(worker("w1")) as registration:
            assert registration.registered
    server.kill()


async def test_a_worker_that_is_cut_off_is_gone_for_others_after_its_lease_and_then_comes_back(
    shared_etcd: EtcdServer, open_etcd: OpenEtcd
) -> None:
    async with (
        TcpProxy(shared_etcd.endpoint) as proxy,
        open_etcd(proxy.address) as cut_off,
        open_etcd(shared_etcd.endpoint) as others,
        Views(others) as views,
        cut_off.register(worker("w1")) as registration,
    ):
        await views.until_ids("w1")
        await proxy.cut()
        await views.until_ids()
        assert not registration.registered
        await proxy.restore()
        await views.until_ids("w1")


async def test_a_thawed_process_gives_way_to_the_one_that_has_taken_its_place(
    shared_etcd: EtcdServer, open_etcd: OpenEtcd, key: str
) -> None:
    async with (
        TcpProxy(shared_etcd.endpoint) as proxy,
        open_etcd(proxy.address) as frozen,
        open_etcd(shared_etcd.endpoint, ttl_seconds=60) as registry,
        frozen.register(worker("w1", 1)) as older,
    ):
        proxy.freeze()
        await eventually(lambda: not older.registered)
        async with registry.register(worker("w1", 2)):
            lease = lease_of(shared_etcd, key)
            await proxy.restore()
            thawed_at = time.monotonic()
            await eventually(lambda: time.monotonic() - thawed_at > TTL_SECONDS)
            assert (older.registered, lease_of(shared_etcd, key)) == (False, lease)
