"""Pools in a GPU's memory: contexts of threads, what stays behind, staging, and how the end of a copy is seen."""

import asyncio
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from structlog.testing import capture_logs
from support.engines.device import DEVICE
from support.transports.device_pools import BLOCKS, gpu_owner, gpu_pool, words
from support.transports.grants import EveryBlock

from services.engines.memory.device_memory import DeviceExport, DeviceUnavailable
from services.engines.pytorch.kv_cache.memory import DeviceMemory, staging_memory
from services.transports.base import Exposure, PoolShape, Transfer
from services.transports.registry import offer_pool, open_transports

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: make gpu")
needs_two_gpus = pytest.mark.skipif(
    DEVICE == "cpu" or torch.cuda.device_count() < 2, reason="needs two GPUs: make gpu where there are two"
)
ALL = tuple(range(BLOCKS))


def numbered(start: int) -> DeviceMemory:
    """A pool whose words count from `start`."""
    pool = gpu_pool()
    flat = words(pool).view(-1)
    flat.copy_(torch.arange(start, start + len(flat), device="cuda"))
    torch.cuda.synchronize()
    return pool


@pytest.mark.skipif(torch.cuda.is_available(), reason="here memory can be pinned")
def test_memory_that_cannot_be_pinned_is_pageable_and_one_warning_says_so() -> None:
    with capture_logs() as logs:
        staging = [staging_memory(3, 4096) for _ in range(4)]
    assert [tuple(each.shape) for each in staging] == [(3, 4096)] * 4
    assert [line["log_level"] for line in logs if "pinned" in line["event"]] in ([], ["warning"])


@needs_gpu
def test_staging_is_pinned_and_brings_the_same_bytes_there_and_back() -> None:
    theirs, ours = numbered(5), gpu_pool()
    assert staging_memory(1, 4096).is_pinned()
    read = theirs.read(ALL)
    writer = ours.write(ALL)
    for source, into in zip(read, writer.views, strict=True):
        into[:] = source
    writer.commit()
    assert torch.equal(words(ours), words(theirs))


@needs_gpu
def test_threads_without_a_context_export_open_and_copy_on_the_pools_device() -> None:
    """Every thread is new, and the pool's device is made current in it."""

    def copy(start: int) -> bool:
        theirs, ours = numbered(start), gpu_pool()
        with ThreadPoolExecutor(1) as other:
            export = other.submit(theirs.export).result()
        with ThreadPoolExecutor(1) as other:
            reader = other.submit(ours.attach, export).result()
        with ThreadPoolExecutor(1) as other:
            other.submit(lambda: reader.begin(ALL, ALL).wait()).result()
        reader.close()
        return torch.equal(words(ours), words(theirs))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(copy, range(0, 8_000, 1_000)))


@needs_gpu
def test_a_device_and_a_handle_that_do_not_exist_are_refused_by_name() -> None:
    with pytest.raises(DeviceUnavailable, match="not a CUDA handle"):
        gpu_pool().attach(DeviceExport("GPU-none", 1, 0, b"short", 0, 1))
    with pytest.raises(DeviceUnavailable, match="of process 1 on GPU GPU-none cannot be mapped"):
        gpu_pool().attach(DeviceExport("GPU-none", 1, 0, b"\x01" * 64, 0, 1))
    assert torch.ones(10, device="cuda").sum().item() == 10


@needs_gpu
def test_pools_that_are_opened_and_closed_leave_no_memory_behind() -> None:
    def turns(count: int) -> None:
        for _ in range(count):
            theirs, ours = gpu_pool(), gpu_pool()
            reader = ours.attach(theirs.export())
            reader.begin(ALL, ALL).wait()
            reader.close()
        del theirs, ours, reader
        gc.collect()
        torch.cuda.synchronize()

    turns(10)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    turns(500)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@needs_gpu
def test_kept_pools_that_are_opened_and_closed_leave_no_memory_and_no_descriptor_behind() -> None:
    ours = gpu_pool()

    def turns(count: int) -> None:
        for turn in range(count):
            theirs = gpu_pool(kept=True)
            words(theirs).fill_(turn)
            torch.cuda.synchronize()
            reader = ours.attach(theirs.export())
            theirs.close()
            reader.begin(ALL, ALL).wait()
            assert words(ours).eq(turn).all()
            reader.close()
        del theirs, reader
        gc.collect()
        torch.cuda.synchronize()

    turns(10)
    before = torch.cuda.mem_get_info(0)[0], len(os.listdir("/proc/self/fd"))
    turns(200)
    assert (torch.cuda.mem_get_info(0)[0], len(os.listdir("/proc/self/fd"))) == before


@needs_gpu
def test_a_descriptor_of_something_else_and_of_a_smaller_pool_are_refused() -> None:
    """The reader says so, and goes on to compute."""
    theirs, ours = gpu_pool(kept=True), gpu_pool()
    export = theirs.export()
    other = os.memfd_create("other")
    with pytest.raises(DeviceUnavailable, match="cannot be opened"):
        ours.attach(replace(export, handle=other))
    with pytest.raises(DeviceUnavailable, match="cannot be mapped"):
        ours.attach(replace(export, size=100 * export.size))
    os.close(other)
    assert torch.ones(10, device="cuda").sum().item() == 10


@needs_gpu
def test_ten_thousand_cycles_leave_the_devices_free_memory_as_it_was() -> None:
    """The driver's count, which includes memory that PyTorch's allocator does not see."""

    def cycles(count: int) -> None:
        for _ in range(count):
            gpu_pool()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def counted() -> tuple[int, int, int]:
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info(0)[0]

    cycles(100)  # streams and the context's own memory
    before = counted()
    cycles(10_000)
    assert counted() == before


@needs_gpu
def test_ten_thousand_allocations_of_the_driver_are_all_returned_to_it() -> None:
    """Each is freed by the driver, not by the allocator's cache."""

    def cycles(count: int) -> None:
        for _ in range(count):
            pool = gpu_pool()
            del pool
            torch.cuda.empty_cache()

    cycles(10)
    before = torch.cuda.mem_get_info(0)[0]
    cycles(10_000)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info(0)[0] == before


@needs_gpu
def test_a_pool_on_a_gpu_that_is_not_there_is_refused_by_its_index() -> None:
    with pytest.raises(DeviceUnavailable, match="cuda:99 does not exist: this process sees"):
        gpu_pool(99)
    assert torch.ones(10, device="cuda").sum().item() == 10


@needs_two_gpus
def test_two_threads_on_two_gpus_allocate_and_copy_each_on_its_own() -> None:
    """Both at the same time, each in a new thread that has no context yet."""
    together = threading.Barrier(2, timeout=60)

    def use(index: int) -> tuple[set[int | None], int, bool]:
        together.wait()
        theirs, ours = gpu_pool(index), gpu_pool(index)
        words(theirs).view(-1).copy_(torch.arange(words(theirs).numel(), device=theirs.tensor.device))
        staging = ours.stage(BLOCKS)
        writer = ours.write(ALL)
        for source, into in zip(theirs.read(ALL), writer.views, strict=True):
            into[:] = source
        together.wait()
        writer.commit()
        devices = {theirs.tensor.device.index, ours.tensor.device.index, staging.area.device, ours.area().device}
        return devices, torch.cuda.current_device(), torch.equal(words(ours), words(theirs))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(use, (0, 1))) == [({0}, 0, True), ({1}, 1, True)]


@needs_gpu
async def test_a_long_copy_is_waited_for_without_the_processor_and_a_pull_ends_only_after_it() -> None:
    ours = gpu_pool()
    async with gpu_owner() as owner, open_transports(("cuda_ipc",), memory=ours) as [transport]:
        pool = await transport.open(owner.endpoint, PoolShape(BLOCKS, ours.block_bytes))
        stream = pool._reader._stream  # type: ignore[attr-defined]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(4_000_000_000)  # about two seconds of the GPU's clock, before the copy
            earlier = torch.cuda.Event()
            earlier.record(stream)
        used, began = time.process_time(), time.monotonic()
        await pool.pull(Transfer(ALL, ours, ALL, time.monotonic() + 60))
        waited, used = time.monotonic() - began, time.process_time() - used
        assert earlier.query()
        assert waited > 0.5
        assert used / waited < 0.05
        assert torch.equal(words(ours).view(-1), torch.arange(words(ours).numel(), device="cuda"))
        pool.close()


@needs_gpu
async def test_pulls_at_the_same_time_do_not_mix_their_blocks() -> None:
    theirs, ours = numbered(7), gpu_pool()
    async with open_transports(("cuda_ipc",), memory=ours) as [transport]:
        [endpoint] = await offer_pool([transport], theirs, Exposure("127.0.0.1", "127.0.0.1", EveryBlock()))
        pool = await transport.open(endpoint, PoolShape(BLOCKS, ours.block_bytes))
        pulls = [
            pool.pull(Transfer([block], ours, [BLOCKS - 1 - block], time.monotonic() + 60)) for block in range(BLOCKS)
        ]
        await asyncio.gather(*pulls)
        pool.close()
    assert torch.equal(words(ours), words(theirs).flip(0))
