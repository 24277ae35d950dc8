"""A watch on a real etcd continues through failures of the server and of the network."""

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from support.clients.scraping import scrape
from support.eventually import eventually
from support.router.worker_views import Views, worker
from support.servers.etcd import EtcdServer, start_cluster
from support.servers.tcp_proxy import TcpProxy

from baton.errors import Unavailable
from discovery.etcd import EtcdConfig, EtcdRegistry
from discovery.etcd.client import EtcdClient

OpenEtcd = Callable[..., AbstractAsyncContextManager[EtcdRegistry]]

# The lease of registries that must not lose it although the machine stands still for a while, and so the time for which
# no worker is removed after an outage.
TTL_SECONDS = 5


async def test_it_goes_on_after_etcd_was_killed_and_restarted(own_etcd: EtcdServer, open_etcd: OpenEtcd) -> None:
    async with open_etcd(own_etcd.endpoint) as registry, Views(registry) as views:
        await views.until_ids()
        own_etcd.kill()
        own_etcd.start()
        async with registry.register(worker("w1")):
            await views.until_ids("w1")


async def test_the_last_view_is_kept_while_etcd_is_away_and_while_workers_register_again(
    own_etcd: EtcdServer, open_etcd: OpenEtcd
) -> None:
    async with (
        open_etcd(own_etcd.endpoint, ttl_seconds=TTL_SECONDS) as registry,
        registry.register(worker("w1")) as registration,
        Views(registry) as views,
    ):
        await views.until_ids("w1")
        own_etcd.kill()
        await eventually(lambda: not registration.registered)
        own_etcd.wipe()
        own_etcd.start()
        await eventually(lambda: registration.registered)
        async with registry.register(worker("w2")):
            await views.until_ids("w1", "w2")
        assert all(view[0] == worker("w1") for view in views.all)


async def test_leases_that_ran_out_while_etcd_was_frozen_do_not_empty_the_view(
    own_etcd: EtcdServer, open_etcd: OpenEtcd
) -> None:
    async with (
        open_etcd(own_etcd.endpoint, ttl_seconds=TTL_SECONDS) as registry,
        registry.register(worker("w1")) as registration,
        Views(registry) as views,
    ):
        await views.until_ids("w1")
        own_etcd.pause()
        frozen_at = time.monotonic()
        await eventually(lambda: time.monotonic() - frozen_at > TTL_SECONDS + 1)
        own_etcd.resume()
        await eventually(lambda: registration.registered)
        async with registry.register(worker("w2")):
            await views.until_ids("w1", "w2")
        assert all(view[0] == worker("w1") for view in views.all)


async def test_a_worker_that_went_while_the_watcher_was_away_is_gone_after_the_grace(
    shared_etcd: EtcdServer, open_etcd: OpenEtcd
) -> None:
    async with (
        TcpProxy(shared_etcd.endpoint) as proxy,
        open_etcd(proxy.address) as watcher,
        open_etcd(shared_etcd.endpoint) as registry,
        Views(watcher) as views,
        registry.register(worker("stays")),
    ):
        async with registry.register(worker("goes")):
            await views.until_ids("goes", "stays")
            await proxy.cut()
        await proxy.restore()
        await views.until_ids("stays")


async def test_changes_while_the_watcher_was_away_are_seen(shared_etcd: EtcdServer, open_etcd: OpenEtcd) -> None:
    async with (
        TcpProxy(shared_etcd.endpoint) as proxy,
        open_etcd(proxy.address) as watcher,
        open_etcd(shared_etcd.endpoint) as registry,
        Views(watcher) as views,
    ):
        await views.until_ids()
        await proxy.cut()
        async with registry.register(worker("w1")) as registration:
            await registration.update(worker("w1", 2))
            await proxy.restore()
            await views.until(lambda workers: workers == (worker("w1", 2),))


async def test_a_compaction_while_the_watcher_was_away_costs_nothing(
    shared_etcd: EtcdServer, open_etcd: OpenEtcd
) -> None:
    async with (
        TcpProxy(shared_etcd.endpoint) as proxy,
        open_etcd(proxy.address) as watcher,
        open_etcd(shared_etcd.endpoint) as registry,
        Views(watcher) as views,
        registry.register(worker("w1")) as registration,
    ):
        await views.until_ids("w1")
        await proxy.cut()
        for epoch in range(2, 6):
            await registration.update(worker("w1", epoch))
        compact(shared_etcd)
        await proxy.restore()
        await views.until(lambda workers: workers == (worker("w1", 5),))
        async with registry.register(worker("w2")):
            await views.until_ids("w1", "w2")


def compact(server: EtcdServer) -> None:
    """Drops all history of the store."""
    status = server.control("endpoint", "status", "--write-out=fields")
    revision = next(line.split()[-1] for line in status.splitlines() if line.startswith('"Revision"'))
    server.control("compact", "--physical", revision)


async def test_a_watch_does_not_begin_on_data_that_are_behind_the_listed(
    shared_etcd: EtcdServer, namespace: str
) -> None:
    first, end = f"/baton/{namespace}/".encode(), f"/baton/{namespace}0".encode()
    async with EtcdClient(EtcdConfig(endpoints=(shared_etcd.endpoint,))) as client:
        listing = await client.list_range(first, end)
        ahead = replace(listing, revision=listing.revision + 1000)
        with pytest.raises(Unavailable, match=f"revision {listing.revision},"):
            await client.watch(first, end, ahead).__aenter__()


async def test_a_watch_does_not_begin_on_another_cluster_than_was_listed(
    shared_etcd: EtcdServer, namespace: str
) -> None:
    first, end = f"/baton/{namespace}/".encode(), f"/baton/{namespace}0".encode()
    async with EtcdClient(EtcdConfig(endpoints=(shared_etcd.endpoint,))) as client:
        listing = await client.list_range(first, end)
        other = replace(listing, cluster_id=listing.cluster_id + 1)
        with pytest.raises(Unavailable, match="a different cluster"):
            await client.watch(first, end, other).__aenter__()


async def test_a_connection_that_hangs_is_noticed(shared_etcd: EtcdServer, open_etcd: OpenEtcd) -> None:
    async with (
        TcpProxy(shared_etcd.endpoint) as proxy,
        open_etcd(proxy.address, shared_etcd.endpoint) as watcher,
        open_etcd(shared_etcd.endpoint) as registry,
        Views(watcher) as views,
    ):
        await views.until_ids()
        proxy.freeze()
        async with registry.register(worker("w1")):
            await views.until_ids("w1")


async def test_a_quiet_watch_stays_on_its_stream(own_etcd: EtcdServer, open_etcd: OpenEtcd) -> None:
    def watches(what: str) -> float:
        return scrape(own_etcd.endpoint).sum(f"grpc_server_{what}_total", grpc_method="Watch")

    async with (
        open_etcd(own_etcd.endpoint, ttl_seconds=60, call_timeout_seconds=0.6) as watcher,
        open_etcd(own_etcd.endpoint) as registry,
        Views(watcher) as views,
        registry.register(worker("stays")),
    ):
        async with registry.register(worker("goes")):
            await views.until_ids("goes", "stays")
            begun, messages = watches("started"), watches("msg_received")
            # Each is asked for after the watch was silent for as long as it may be.
            await eventually(lambda: watches("msg_received") >= messages + 3)
            assert watches("started") == begun
        # Had the watch been begun anew, who goes would be kept for the grace.
        await views.until_ids("stays", seconds=30)


async def test_malformed_records_are_left_out(shared_etcd: EtcdServer, open_etcd: OpenEtcd, namespace: str) -> None:
    async with open_etcd(shared_etcd.endpoint) as registry:
        shared_etcd.control("put", f"/baton/{namespace}/workers/before", "{")
        async with Views(registry) as views, registry.register(worker("w1")):
            await views.until_ids("w1")
            shared_etcd.control("put", f"/baton/{namespace}/workers/after", '{"worker_id": 7}')
            shared_etcd.control("put", f"/baton/{namespace}/workers/other", worker("w1").to_json().decode())
            async with registry.register(worker("w2")):
                await views.until_ids("w1", "w2")


async def test_records_that_together_are_larger_than_a_message_do_not_hide_a_worker(
    own_etcd: EtcdServer, open_etcd: OpenEtcd, namespace: str
) -> None:
    large = b"x" * (1400 * 1024)
    async with EtcdClient(EtcdConfig(endpoints=(own_etcd.endpoint,))) as client:
        lease = await client.grant(600)
        for number in range(50):
            await client.put(f"/baton/{namespace}/workers/large-{number}".encode(), large, lease)
    async with open_etcd(own_etcd.endpoint) as registry, registry.register(worker("w1")), Views(registry) as views:
        await views.until_ids("w1")


async def test_a_record_that_becomes_malformed_takes_its_worker_out(
    shared_etcd: EtcdServer, open_etcd: OpenEtcd, namespace: str
) -> None:
    key = f"/baton/{namespace}/workers/foreign"
    async with open_etcd(shared_etcd.endpoint) as registry, Views(registry) as views:
        shared_etcd.control("put", key, worker("foreign").to_json().decode())
        await views.until_ids("foreign")
        shared_etcd.control("put", key, "{}")
        await views.until_ids()


async def test_with_three_members_a_frozen_leader_costs_seconds(tmp_path: Path, open_etcd: OpenEtcd) -> None:
    members = start_cluster(tmp_path, 3)
    try:
        members.sort(key=is_leader, reverse=True)
        async with (
            open_etcd(*(member.endpoint for member in members), ttl_seconds=TTL_SECONDS) as registry,
            registry.register(worker("w1")) as registration,
            Views(registry) as views,
        ):
            await views.until_ids("w1")
            members[0].pause()
            paused_at = time.monotonic()
            async with registry.register(worker("w2")):
                await views.until_ids("w1", "w2")
            await eventually(lambda: registration.registered)
            assert time.monotonic() - paused_at < 30
            assert all(view[0] == worker("w1") for view in views.all)
    finally:
        for member in members:
            member.kill()


def is_leader(member: EtcdServer) -> bool:
    """True if it leads its cluster."""
    fields = dict(
        line.split(" : ", 1) for line in member.control("endpoint", "status", "-w=fields").splitlines() if " : " in line
    )
    return fields['"MemberID"'] == fields['"Leader"']


async def test_with_three_members_a_killed_one_goes_unnoticed(tmp_path: Path, open_etcd: OpenEtcd) -> None:
    members = start_cluster(tmp_path, 3)
    try:
        members.sort(key=is_leader)
        async with (
            open_etcd(*(member.endpoint for member in members), ttl_seconds=TTL_SECONDS) as registry,
            registry.register(worker("w1")) as registration,
            Views(registry) as views,
        ):
            await views.until_ids("w1")
            members[0].kill()
            async with registry.register(worker("w2")):
                await views.until_ids("w1", "w2")
            assert registration.registered
    finally:
        for member in members:
            member.kill()
