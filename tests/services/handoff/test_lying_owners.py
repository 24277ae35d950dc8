"""Owners that say something impossible of their pools: a typed error for a handoff, and nothing else."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.clients.worker_calls import decode_request
from support.cluster.workers import Running, Starter
from support.eventually import eventually

from baton.engine.v1 import handoff_pb2, handoff_pb2_grpc
from baton.errors import HandoffLost
from rpc.health import Health
from rpc.server import Service, serve
from runtime.lasting import FAILURES
from services.transports.shm import host_id

Endpoint = handoff_pb2.TransportEndpoint


def tcp(host: str, port: int) -> Endpoint:
    return Endpoint(tcp=handoff_pb2.TcpEndpoint(host=host, port=port, token=b"1"))


def shm(path: str, size: int) -> Endpoint:
    return Endpoint(shm=handoff_pb2.ShmEndpoint(host_id=host_id(), path=path, size=size))


LIES: dict[str, list[Endpoint]] = {
    "nothing": [],
    "an unknown transport": [Endpoint()],
    "a long host": [tcp("a" * 300, 1)],
    "a host of several megabytes": [tcp("a" * 3 * 2**20, 1)],
    "a host with a zero": [tcp("a\0b", 1)],
    "an empty label": [tcp("a..b", 1)],
    "no host": [tcp("", 0)],
    "no port": [tcp("127.0.0.1", 2**32 - 1)],
    "no such file": [shm("/proc/1/fd/99999", 2**64 - 1)],
    "no path": [shm("x" * 10_000, 2**40)],
    "very many": [tcp("a" * 300, 1)] * 100_000,
    "very many unknown ones": [Endpoint()] * 100_000,
}


class Liar(handoff_pb2_grpc.HandoffServiceServicer):
    """Tells of a pool that is not there. `asked` counts."""

    def __init__(self, owner: Running, endpoints: list[Endpoint]) -> None:
        self.address = ""
        self.asked = 0
        layout = owner.worker.engine.facts.layout
        self._pool = handoff_pb2.GetPoolResponse(
            epoch=owner.worker.epoch,
            worker_id="liar",
            num_blocks=2**32 - 1,
            layout=handoff_pb2.KvLayout(digest=layout.digest, block_bytes=layout.block_bytes),
            endpoints=endpoints,
        )

    async def GetPool(self, request: Any, context: Any) -> Any:
        self.asked += 1
        return self._pool


@asynccontextmanager
async def lying(owner: Running, endpoints: list[Endpoint]) -> AsyncIterator[Liar]:
    liar = Liar(owner, endpoints)
    add = handoff_pb2_grpc.add_HandoffServiceServicer_to_server
    service = Service("baton.engine.v1.HandoffService", add, liar)
    async with serve("127.0.0.1:0", [service], health=Health(), drain_seconds=0) as server:
        liar.address = server.address
        yield liar


@pytest.mark.parametrize("lie", LIES)
async def test_a_handoff_is_lost_if_its_owners_pool_cannot_be_read(prefill: Running, decode: Running, lie: str) -> None:
    async with lying(prefill, LIES[lie]) as liar:
        handoff = await prefill.calls.prefill()
        handoff.address = liar.address
        with pytest.raises(HandoffLost) as refused:
            await decode.calls.decode(decode_request(handoff))
        assert len(refused.value.message) < 2000


@pytest.mark.parametrize("lie", LIES)
async def test_pools_that_cannot_be_read_keep_no_worker_from_being_ready(
    start: Starter, prefill: Running, lie: str
) -> None:
    [record] = start.registry.workers()
    failures = FAILURES.labels("pools of peers")._value.get()
    async with lying(prefill, LIES[lie]) as liar:
        wrong = replace(record, worker_id="liar", address=liar.address)
        async with start.registry.register(wrong):
            started = time.monotonic()
            async with start("decode") as decode:
                assert time.monotonic() - started < 20
                await eventually(lambda: liar.asked > 0)
                whole = await decode.calls.decode(decode_request(await prefill.calls.prefill()))
                assert whole.transport == "shm"
    assert FAILURES.labels("pools of peers")._value.get() == failures
