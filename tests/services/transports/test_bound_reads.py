"""A reader may read a pool only with a handoff that is held in it, and over tcp only that handoff's blocks."""

import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from support.cluster.workers import Running, Starter
from support.eventually import PATIENCE_SECONDS
from support.transports.nixl import NIXL

from baton.calls import unary
from baton.engine.v1 import handoff_pb2
from baton.errors import HandoffLost, LayoutMismatch
from runtime.aio import timeout
from services.engines.memory.shared_pool import SharedPool
from services.handoff.leases import LeaseTable
from services.transports.base import PoolShape, Transfer, TransferFailed, TransportUnavailable
from services.transports.frames import COUNT, ID_LENGTH, MAGIC
from services.transports.registry import open_transports
from services.transports.shm import host_id


async def get_pool(owner: Running, handoff_id: str, digest: str = "") -> handoff_pb2.GetPoolResponse:
    digest = digest or owner.worker.engine.facts.layout.digest
    request = handoff_pb2.GetPoolRequest(epoch=owner.worker.epoch, layout_digest=digest, handoff_id=handoff_id)
    answer: handoff_pb2.GetPoolResponse = await unary(owner.calls.handoffs.GetPool(request, timeout=PATIENCE_SECONDS))
    return answer


@pytest.mark.parametrize("transport", ["shm", NIXL, "tcp"])
async def test_a_handoff_that_is_named_to_learn_how_to_read_a_pool_must_be_held(start: Starter, transport: str) -> None:
    async with start("prefill", transports=(transport,)) as prefill:
        handoff = await prefill.calls.prefill()
        [endpoint] = (await get_pool(prefill, handoff.handoff_id)).endpoints
        assert endpoint.WhichOneof("endpoint") == transport
        with pytest.raises(HandoffLost):
            await get_pool(prefill, "a guess")
        await prefill.calls.release(handoff)
        with pytest.raises(HandoffLost):
            await get_pool(prefill, handoff.handoff_id)


async def test_what_is_held_in_one_pool_opens_no_other(prefill: Running) -> None:
    handoff = await prefill.calls.prefill()
    with pytest.raises(LayoutMismatch):
        await get_pool(prefill, handoff.handoff_id, "another layout")


@asynccontextmanager
async def tcp_reader(owner: Running, handoff: handoff_pb2.KvHandoff) -> AsyncIterator[Any]:
    """A reader that knows how to read the pool, from a handoff of its own."""
    [endpoint] = (await get_pool(owner, handoff.handoff_id)).endpoints
    async with open_transports(("tcp",)) as [transport]:
        reader = await transport.open(endpoint, PoolShape(64, 1024))
        yield reader
        reader.close()


@pytest.fixture
def ours() -> Iterator[SharedPool]:
    with SharedPool(64, 1024) as pool:
        yield pool


def transfer(handoff: handoff_pb2.KvHandoff, block_ids: list[int], ours: SharedPool) -> Transfer:
    return Transfer(block_ids, ours, range(len(block_ids)), time.monotonic() + 10, handoff.handoff_id)


async def test_a_reader_gets_the_blocks_of_its_handoff(start: Starter, ours: SharedPool) -> None:
    async with start("prefill", transports=("tcp",)) as prefill:
        handoff = await prefill.calls.prefill()
        async with tcp_reader(prefill, handoff) as reader:
            await reader.pull(transfer(handoff, list(handoff.block_ids), ours))
        assert bytes(ours.block(0)) == b"".join(prefill.worker.engine.memory.read(handoff.block_ids[:1]))


async def test_a_reader_gets_no_block_of_another_handoff(start: Starter, ours: SharedPool) -> None:
    async with start("prefill", transports=("tcp",)) as prefill:
        mine, other = await prefill.calls.prefill("mine"), await prefill.calls.prefill("other", bytes(range(90, 140)))
        async with tcp_reader(prefill, mine) as reader:
            with pytest.raises(TransferFailed):
                await reader.pull(transfer(mine, list(other.block_ids), ours))
            with pytest.raises(TransferFailed):
                await reader.pull(transfer(mine, [*mine.block_ids, other.block_ids[0]], ours))
        assert not any(ours.block(0).obj[:])


async def test_a_reader_gets_nothing_any_more_of_what_was_released(start: Starter, ours: SharedPool) -> None:
    async with start("prefill", transports=("tcp",)) as prefill:
        handoff = await prefill.calls.prefill()
        async with tcp_reader(prefill, handoff) as reader:
            await prefill.calls.release(handoff)
            with pytest.raises(TransferFailed):
                await reader.pull(transfer(handoff, list(handoff.block_ids), ours))


async def test_the_token_alone_opens_nothing(start: Starter) -> None:
    async with start("prefill", transports=("tcp",)) as prefill:
        handoff = await prefill.calls.prefill()
        [endpoint] = (await get_pool(prefill, handoff.handoff_id)).endpoints
        with socket.create_connection((endpoint.tcp.host, endpoint.tcp.port), timeout=60) as connection:
            question = ID_LENGTH.pack(0) + COUNT.pack(1) + handoff.block_ids[0].to_bytes(4, "little")
            connection.sendall(MAGIC + endpoint.tcp.token + question)
            with suppress(ConnectionResetError):
                assert connection.recv(64) == b""


@dataclass(frozen=True)
class Blocks:
    """Blocks outside of the pool."""

    block_ids: tuple[int, ...]
    num_tokens: int = 1

    async def release(self) -> int:
        return 0


async def test_with_certificates_only_those_whom_a_handoff_is_for_may_read_it() -> None:
    async with LeaseTable(10) as table:
        lease = table.hold("r", Blocks((1, 2)), "layout", frozenset({"baton://worker/d1"}))
        guard = table.guard("layout")
        assert guard.may_read(lease.handoff_id, "baton://worker/d1", [2])
        assert not guard.may_read(lease.handoff_id, "baton://worker/d2", [2])
        assert not table.guard("another layout").may_read(lease.handoff_id, "baton://worker/d1", [2])


async def test_a_path_that_became_a_pipe_is_unavailable_and_blocks_no_other_read() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    shm = handoff_pb2.ShmEndpoint(host_id=host_id(), path=f"/proc/{os.getpid()}/fd/{reading}", size=4096)
    try:
        async with open_transports(("shm",)) as [transport], timeout(20):
            with pytest.raises(TransportUnavailable, match="not a file in memory"):
                await transport.open(handoff_pb2.TransportEndpoint(shm=shm), PoolShape(1, 4096))
    finally:
        os.close(reading)
