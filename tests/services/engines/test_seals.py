"""Digests of blocks: the same on the host as on a device, and other ones for other bytes."""

import random

import pytest
import torch

from services.engines.memory.shared_pool import Scratch
from services.engines.pytorch.kv_cache.digester import Digester
from services.engines.seals import host_digests


def filled(num_blocks: int, block_bytes: int) -> Scratch:
    memory = Scratch(num_blocks, block_bytes)
    for view in memory.write(range(num_blocks)).views:
        view[:] = random.Random(block_bytes).randbytes(len(view))
    return memory


@pytest.mark.parametrize("block_bytes", [1024, 12288, 1 << 20])
def test_the_host_digests_as_devices_do(block_bytes: int) -> None:
    memory, blocks = filled(9, block_bytes), [7, 1, 2, 3, 8]
    words = torch.frombuffer(bytearray(memory.take(9 * block_bytes)), dtype=torch.int32).view(9, -1)
    on_device = Digester(block_bytes, torch.device("cpu")).digest(words, blocks)
    assert host_digests(memory, blocks) == [int(each) % 2**64 for each in on_device.tolist()]


@pytest.mark.parametrize("block_bytes", [5, 1022, 4096])
def test_any_byte_that_differs_changes_the_digest_of_its_block_alone(block_bytes: int) -> None:
    memory = filled(3, block_bytes)
    before = host_digests(memory, range(3))
    for place in (0, block_bytes // 2, block_bytes - 1):
        [view] = memory.write([1]).views
        view[place] ^= 0x10
        after = host_digests(memory, range(3))
        assert (after[0], after[2]) == (before[0], before[2])
        assert after[1] != before[1]
        view[place] ^= 0x10
    assert host_digests(memory, range(3)) == before
