"""The transport nixl between pools in a GPU's memory, in two processes."""

import contextlib
import random
import signal
import time

import pytest
import torch
from support.engines.device import DEVICE
from support.transports.device_pools import BLOCK_BYTES, BLOCKS, gpu_owner, gpu_pool, words
from support.transports.nixl import needs_nixl, owner_process

from services.engines.memory.shared_pool import Scratch
from services.transports.base import PoolShape, Transfer, TransferFailed, TransportUnavailable
from services.transports.registry import open_transports

SHAPE = PoolShape(BLOCKS, BLOCK_BYTES)
WORDS = BLOCK_BYTES // 8

pytestmark = [needs_nixl, pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: make gpu")]


def soon() -> float:
    return time.monotonic() + 30


async def test_words_in_a_gpus_memory_arrive_in_their_places_without_host_memory() -> None:
    ours = gpu_pool()
    source, destination = random.sample(range(BLOCKS), BLOCKS // 2), random.sample(range(BLOCKS), BLOCKS // 2)
    async with gpu_owner("nixl") as owner, open_transports(("nixl",), memory=ours) as [transport]:
        reader = await transport.open(owner.endpoint, SHAPE)
        await reader.pull(Transfer(source, ours, destination, soon()))
        with pytest.raises(TransferFailed, match="into the worker's own pool only"):
            await reader.pull(Transfer(source, Scratch(BLOCKS, BLOCK_BYTES), destination, soon()))
        reader.close()
    expected = torch.zeros_like(words(ours))
    for block, into in zip(source, destination, strict=True):
        expected[into] = torch.arange(block * WORDS, (block + 1) * WORDS)
    assert torch.equal(words(ours), expected)


async def test_a_pool_in_host_memory_is_read_into_a_gpus_and_the_other_way_round_it_is_refused() -> None:
    ours = gpu_pool()
    async with owner_process() as in_host_memory, open_transports(("nixl",), memory=ours) as [transport]:
        reader = await transport.open(in_host_memory.endpoint, SHAPE)
        await reader.pull(Transfer(range(BLOCKS), ours, range(BLOCKS), soon()))
        reader.close()
    assert torch.all(words(ours) == 0x0101010101010101)
    async with gpu_owner("nixl") as owner, open_transports(("nixl",)) as [transport]:
        with pytest.raises(TransportUnavailable):
            await transport.open(owner.endpoint, SHAPE)


async def test_an_owner_that_dies_fails_the_next_pull_and_harms_nothing_here() -> None:
    ours = gpu_pool()
    async with open_transports(("nixl",), memory=ours) as [transport]:
        async with gpu_owner("nixl") as owner:
            reader = await transport.open(owner.endpoint, SHAPE)
            owner.signal(signal.SIGKILL)
            owner.process.join()
            # Memory that is mapped already may stay readable.
            with contextlib.suppress(TransferFailed):
                await reader.pull(Transfer(range(BLOCKS), ours, range(BLOCKS), time.monotonic() + 5))
            reader.close()
        assert torch.ones(1000, device="cuda").sum().item() == 1000
        async with gpu_owner("nixl") as another:
            reader = await transport.open(another.endpoint, SHAPE)
            await reader.pull(Transfer(range(BLOCKS), ours, range(BLOCKS), soon()))
            reader.close()
        assert torch.equal(words(ours).view(-1).cpu(), torch.arange(BLOCKS * WORDS))
