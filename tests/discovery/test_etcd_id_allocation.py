"""A number in a real etcd is unique, also after its lease was lost."""

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from support.eventually import eventually
from support.servers.etcd import EtcdServer

from discovery.etcd import EtcdConfig, EtcdRegistry
from discovery.etcd.client import EtcdClient

OpenEtcd = Callable[..., AbstractAsyncContextManager[EtcdRegistry]]


def lease_of(server: EtcdServer, key: str) -> str:
    entries = json.loads(server.control("get", "--write-out=json", key)).get("kvs", [])
    return f"{entries[0]['lease']:x}" if entries else ""


async def test_a_number_whose_lease_was_lost_is_taken_again(
    shared_etcd: EtcdServer, open_etcd: OpenEtcd, namespace: str
) -> None:
    async with open_etcd(shared_etcd.endpoint) as registry, registry.allocate_id("node", 1) as number:
        key = f"/baton/{namespace}/numbers/node/0"
        lost = lease_of(shared_etcd, key)
        shared_etcd.control("lease", "revoke", lost)
        await eventually(lambda: lease_of(shared_etcd, key) not in ("", lost))
        assert number.value == 0


async def test_a_number_that_another_process_has_by_now_is_not_taken_from_it(
    shared_etcd: EtcdServer, open_etcd: OpenEtcd, namespace: str
) -> None:
    async with open_etcd(shared_etcd.endpoint) as registry, registry.allocate_id("node", 2) as number:
        key = f"/baton/{namespace}/numbers/node/{number.value}"
        before, ours = number.value, lease_of(shared_etcd, key)
        # Without our lease, as of one who has it already.
        shared_etcd.control("put", key, "theirs")
        shared_etcd.control("lease", "revoke", ours)
        await eventually(lambda: number.value != before)


async def test_a_number_is_given_back_when_its_process_ends(
    shared_etcd: EtcdServer, open_etcd: OpenEtcd, namespace: str
) -> None:
    async with open_etcd(shared_etcd.endpoint) as registry:
        async with registry.allocate_id("node", 8) as number:
            key = f"/baton/{namespace}/numbers/node/{number.value}"
            assert lease_of(shared_etcd, key)
        assert not lease_of(shared_etcd, key)


async def test_two_that_want_one_number_do_not_both_get_it(shared_etcd: EtcdServer, namespace: str) -> None:
    async with EtcdClient(EtcdConfig(endpoints=(shared_etcd.endpoint,))) as client:
        key = f"/baton/{namespace}/numbers/node/0".encode()
        assert await client.create(key, b"", await client.grant(5))
        assert not await client.create(key, b"", await client.grant(5))
