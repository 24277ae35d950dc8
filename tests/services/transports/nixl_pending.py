"""Pending NIXL reads that are cancelled. test_nixl.py runs these in a separate process."""

import asyncio

import pytest
from support.transports.nixl import BLOCK_BYTES, BLOCKS, is_empty, owner_process, transfer

from runtime.aio import timeout
from services.engines.memory.shared_pool import SharedPool
from services.transports.base import PoolShape, TransferFailed
from services.transports.registry import open_transports


@pytest.fixture(autouse=True)
def emulated_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only way to have a pending read here: the owner has to answer, and does so as soon as it wakes."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_PROTO_EMULATION_ENABLE", "y")


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_read_that_was_given_up_while_its_owner_was_frozen_never_writes_into_a_block(
    ours: SharedPool, how: str
) -> None:
    async with owner_process() as owner, open_transports(("nixl",)) as [transport]:
        reader = await transport.open(owner.endpoint, PoolShape(BLOCKS, BLOCK_BYTES))
        owner.pause()
        pulling = asyncio.create_task(reader.pull(transfer(ours, 0.6 if how == "late" else 60)))
        await asyncio.wait([pulling], timeout=0.2)
        assert not pulling.done()
        async with timeout(60):
            if how == "cancelled":
                pulling.cancel()
            [outcome] = await asyncio.gather(pulling, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError if how == "cancelled" else TransferFailed)
        owner.resume()
        await asyncio.sleep(0.5)
        assert is_empty(ours)
        reader.close()


async def test_a_frozen_owner_does_not_disturb_reads_from_another(ours: SharedPool) -> None:
    async with owner_process() as frozen, owner_process() as owner, open_transports(("nixl",)) as [transport]:
        readers = [await transport.open(each.endpoint, PoolShape(BLOCKS, BLOCK_BYTES)) for each in (frozen, owner)]
        frozen.pause()
        stuck = asyncio.create_task(readers[0].pull(transfer(ours, 1)))
        await readers[1].pull(transfer(ours))
        assert not stuck.done()
        assert bytes(ours.block(0)) == b"\x01" * BLOCK_BYTES
        with pytest.raises(TransferFailed):
            await stuck
        for reader in readers:
            reader.close()


async def test_a_pool_is_read_again_after_a_read_that_was_given_up(ours: SharedPool) -> None:
    async with owner_process() as owner, open_transports(("nixl",)) as [transport]:
        reader = await transport.open(owner.endpoint, PoolShape(BLOCKS, BLOCK_BYTES))
        with pytest.raises(TransferFailed):
            await reader.pull(transfer(ours, 0.002))
        await reader.pull(transfer(ours))
        assert bytes(ours.block(0).obj) == b"\x01" * (BLOCKS * BLOCK_BYTES)
        reader.close()
