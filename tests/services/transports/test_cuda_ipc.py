"""The transport cuda_ipc: its refusals, the end of a pull, and, on a GPU, two processes."""

import asyncio
import os
import random
import signal
import time

import pytest
import torch
from support.engines.device import DEVICE
from support.transports.device_pools import (
    BLOCK_BYTES,
    BLOCKS,
    HostAsDevice,
    KeptHostAsDevice,
    gpu_owner,
    gpu_pool,
    host_pools,
    read_elsewhere,
    words,
)
from support.transports.grants import EveryBlock

from services.engines.kv import BlockMemory
from services.engines.memory.shared_pool import SharedPool
from services.transports.base import (
    Endpoint,
    Exposure,
    PoolShape,
    Transfer,
    TransferFailed,
    TransportUnavailable,
    transport_of,
)
from services.transports.registry import offer_pool, open_transports

LOOPBACK = Exposure("127.0.0.1", "127.0.0.1", EveryBlock())
SHAPE = PoolShape(BLOCKS, BLOCK_BYTES)
WORDS = BLOCK_BYTES // 8

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: make gpu")


def transfer(memory: object, source: list[int], destination: list[int], seconds: float = 20) -> Transfer:
    return Transfer(source, memory, destination, time.monotonic() + seconds)  # type: ignore[arg-type]


async def offered(pool: BlockMemory) -> Endpoint | None:
    async with open_transports(("cuda_ipc",)) as transports:
        return next(iter(await offer_pool(transports, pool, LOOPBACK)), None)


async def test_a_pool_in_host_memory_is_not_offered() -> None:
    with SharedPool(4, 4096) as pool:
        async with open_transports(("cuda_ipc", "shm")) as transports:
            endpoints = await offer_pool(transports, pool, LOOPBACK)
            assert [transport_of(endpoint) for endpoint in endpoints] == ["shm"]


async def test_a_pool_that_cuda_does_not_share_is_not_offered() -> None:
    with HostAsDevice(4, 4096) as pool:
        pool.lost = "CUDA_ERROR_NOT_SUPPORTED"
        async with open_transports(("cuda_ipc",)) as transports:
            assert await offer_pool(transports, pool, LOOPBACK) == []


async def test_blocks_arrive_where_they_belong_and_nowhere_else() -> None:
    with host_pools() as (theirs, ours):
        async with open_transports(("cuda_ipc",), memory=ours) as [transport]:
            [endpoint] = await offer_pool([transport], theirs, LOOPBACK)
            reader = await transport.open(endpoint, SHAPE)
            await reader.pull(transfer(ours, [9, 3, 4], [40, 7, 8]))
            reader.close()
        assert [ours.block(into) for into in (40, 7, 8)] == [theirs.block(block) for block in (9, 3, 4)]
        assert [block for block in range(BLOCKS) if any(ours.block(block))] == [7, 8, 40]


async def test_a_kept_pool_is_read_by_its_descriptor_of_which_none_stays_open() -> None:
    with host_pools(KeptHostAsDevice) as (theirs, ours):
        before = len(os.listdir("/proc/self/fd"))
        async with open_transports(("cuda_ipc",), memory=ours) as [transport]:
            [endpoint] = await offer_pool([transport], theirs, LOOPBACK)
            assert endpoint.cuda_ipc.handle == b""
            reader = await transport.open(endpoint, SHAPE)
            await reader.pull(transfer(ours, [9, 3, 4], [40, 7, 8]))
            reader.close()
        assert [ours.block(into) for into in (40, 7, 8)] == [theirs.block(block) for block in (9, 3, 4)]
        assert len(os.listdir("/proc/self/fd")) == before


async def test_a_kept_pool_of_an_owner_that_has_ended_is_refused() -> None:
    with host_pools(KeptHostAsDevice) as (theirs, ours):
        endpoint = await offered(theirs)
        assert endpoint is not None
        async with open_transports(("cuda_ipc",), memory=ours) as [transport]:
            with pytest.raises(TransportUnavailable, match="does not hand over its memory's descriptor"):
                await transport.open(endpoint, SHAPE)


async def test_what_cannot_be_read_is_refused_with_the_reason() -> None:
    with host_pools() as (theirs, ours), SharedPool(BLOCKS, BLOCK_BYTES) as host:
        endpoint = await offered(theirs)
        assert endpoint is not None
        async with open_transports(("cuda_ipc",), memory=host) as [transport]:
            with pytest.raises(TransportUnavailable, match="not in a GPU's memory"):
                await transport.open(endpoint, SHAPE)
        async with open_transports(("cuda_ipc",), memory=ours) as [transport]:
            with pytest.raises(TransportUnavailable, match="bytes do not hold 65 blocks"):
                await transport.open(endpoint, PoolShape(BLOCKS + 1, BLOCK_BYTES))
            with pytest.raises(TransportUnavailable, match="bytes do not hold 64 blocks of 8"):
                await transport.open(endpoint, PoolShape(BLOCKS, 8))
            ours.lost = "no peer access"
            with pytest.raises(TransportUnavailable, match="no peer access"):
                await transport.open(endpoint, SHAPE)
            ours.lost = ""
            endpoint.cuda_ipc.host_id = "elsewhere"
            with pytest.raises(TransportUnavailable, match="another host, container or user"):
                await transport.open(endpoint, SHAPE)


async def test_a_pull_that_is_given_up_ends_when_nothing_writes_any_more() -> None:
    with host_pools() as (theirs, ours):
        endpoint = await offered(theirs)
        assert endpoint is not None
        async with open_transports(("cuda_ipc",), memory=ours) as [transport]:
            reader = await transport.open(endpoint, SHAPE)
            theirs.may_copy.clear()
            pulling = asyncio.create_task(reader.pull(transfer(ours, [1], [2])))
            assert await asyncio.to_thread(theirs.copying.wait, 20)
            pulling.cancel()
            ended, _ = await asyncio.wait([pulling], timeout=0.05)
            assert not ended
            theirs.may_copy.set()
            with pytest.raises(asyncio.CancelledError):
                await pulling
            assert ours.block(2) == theirs.block(1)


async def test_a_pull_that_fails_or_comes_too_late_says_so() -> None:
    with host_pools() as (theirs, ours):
        endpoint = await offered(theirs)
        assert endpoint is not None
        async with open_transports(("cuda_ipc",), memory=ours) as [transport]:
            reader = await transport.open(endpoint, SHAPE)
            with pytest.raises(TransferFailed, match="deadline exceeded"):
                await reader.pull(transfer(ours, [1], [2], seconds=-1))
            theirs.lost = "an illegal address"
            with pytest.raises(TransferFailed, match="an illegal address"):
                await reader.pull(transfer(ours, [1], [2]))


@needs_gpu
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("count", [1, 7, BLOCKS])
async def test_words_of_another_process_arrive_in_their_places(count: int, kept: bool) -> None:
    ours = gpu_pool()
    source, destination = random.sample(range(BLOCKS), count), random.sample(range(BLOCKS), count)
    async with gpu_owner(kept=kept) as owner, open_transports(("cuda_ipc",), memory=ours) as [transport]:
        reader = await transport.open(owner.endpoint, SHAPE)
        await reader.pull(transfer(ours, source, destination))
        reader.close()
    expected = torch.zeros_like(words(ours))
    for block, into in zip(source, destination, strict=True):
        expected[into] = torch.arange(block * WORDS, (block + 1) * WORDS)
    assert torch.equal(words(ours), expected)


@needs_gpu
@pytest.mark.parametrize("kept", [False, True])
async def test_a_reader_need_not_see_the_owners_gpu(kept: bool) -> None:
    """Each process sees its own GPU only, where there are two, as workers of `baton up` do."""
    async with gpu_owner(kept=kept) as owner:
        assert await read_elsewhere(owner.endpoint) is True


@needs_gpu
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_owner_that_dies_or_stops_amid_pulls_harms_nothing_here(number: signal.Signals, kept: bool) -> None:
    """Each pull brings the right words or fails by name, and this process continues to compute and to
    pull from others.
    """
    ours = gpu_pool()
    ids = list(range(BLOCKS))
    right = torch.arange(BLOCKS * WORDS, device="cuda").view(BLOCKS, WORDS)
    async with open_transports(("cuda_ipc",), memory=ours) as [transport]:
        async with gpu_owner(kept=kept) as owner:
            reader = await transport.open(owner.endpoint, SHAPE)
            failures = 0
            for turn in range(60):
                words(ours).zero_()
                torch.cuda.synchronize()
                pulling = asyncio.create_task(reader.pull(transfer(ours, ids, ids)))
                if turn == 20:
                    await asyncio.sleep(0)
                    owner.signal(number)
                try:
                    await pulling
                except TransferFailed:
                    failures += 1
                else:
                    assert torch.equal(words(ours), right)
            print(f"after {number.name}: {failures} of 60 pulls failed")
            reader.close()
        assert torch.ones(1000, device="cuda").sum().item() == 1000
        async with gpu_owner(kept=kept) as another:
            reader = await transport.open(another.endpoint, SHAPE)
            words(ours).zero_()
            torch.cuda.synchronize()
            await reader.pull(transfer(ours, ids, ids))
            assert torch.equal(words(ours), right)
            reader.close()


@needs_gpu
@pytest.mark.parametrize(("kept", "reason"), [(False, "cannot be mapped"), (True, "does not hand over its memory")])
async def test_a_handle_of_memory_that_is_gone_is_refused(kept: bool, reason: str) -> None:
    ours = gpu_pool()
    async with gpu_owner(kept=kept) as owner:
        endpoint = owner.endpoint
    async with open_transports(("cuda_ipc",), memory=ours) as [transport]:
        with pytest.raises(TransportUnavailable, match=reason):
            await transport.open(endpoint, SHAPE)
    assert torch.ones(1000, device="cuda").sum().item() == 1000
