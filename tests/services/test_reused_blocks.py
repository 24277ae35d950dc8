"""A pull that reads blocks after they were given to somebody else: what it brought is thrown away."""

import asyncio

import pytest
from support.tcp_proxy import TcpProxy
from support.worker_calls import decode_request, until
from support.workers import Running, Starter

from rpc.errors import HandoffLost
from rpc.fault_plan import FAULT_KEY

SECRET = b"somebody else's prompt, which nobody may see or go on from......"


def contents(running: Running) -> set[bytes]:
    """What is in the blocks of a worker's pool."""
    memory = running.worker.engine.memory
    return {bytes(view) for block in range(memory.num_blocks) for view in memory.read([block])}


async def test_what_was_read_from_blocks_that_had_been_reused_is_thrown_away(start: Starter) -> None:
    async with (
        start("prefill", lease_seconds=10, num_blocks=8) as prefill,
        start("decode", allow_faults=True) as decode,
        TcpProxy(prefill.calls.address) as between,
    ):
        # The pool is open from here on: shared memory is read without asking its owner.
        opened = await prefill.calls.prefill("first")
        opened.address = between.address
        assert (await decode.calls.decode(decode_request(opened, "first"))).transport == "shm"

        text = b"a prompt of which nothing is in any cache"
        handoff = await prefill.calls.prefill(text=text)
        handoff.address = between.address
        request = decode_request(handoff, text=text)
        decoding = asyncio.create_task(decode.calls.decode(request, metadata=((FAULT_KEY, "delay=0.5@pull"),)))
        await until(lambda: decode.blocks_used > 0)

        # The reader cannot hear of it: its owner ends the lease, and gives the blocks to others.
        between.freeze()
        await prefill.worker.leases.release_all()
        for index in range(3):
            await prefill.calls.release(await prefill.calls.prefill(f"other{index}", bytes([48 + index]) + SECRET))
        memory = prefill.worker.engine.memory
        reused = {bytes(view) for block in handoff.block_ids for view in memory.read([block])}
        await until(lambda: bool(reused & contents(decode)))

        await between.restore()
        with pytest.raises(HandoffLost, match="did not hold"):
            await decoding
        assert decode.blocks_used == 0

        # Nothing of it is left to be found by its hash either.
        again = await prefill.calls.prefill("again", text)
        whole = await decode.calls.decode(decode_request(again, "again", text))
        undisturbed = await decode.calls.decode(decode_request(None, "alone", text))
        assert [again.first_token.token_id, *whole.token_ids] == undisturbed.token_ids


async def test_a_pull_that_was_frozen_for_longer_than_the_lease_is_thrown_away(start: Starter) -> None:
    async with start("prefill", lease_seconds=1) as prefill, start("decode", allow_faults=True) as decode:
        handoff = await prefill.calls.prefill()
        # The reader's whole process stands still, and cannot renew; so does this test, which shares it.
        metadata = ((FAULT_KEY, "freeze=1.5@pull"),)
        with pytest.raises(HandoffLost):
            await decode.calls.decode(decode_request(handoff), metadata=metadata)
        await until(lambda: decode.blocks_used == 0 and prefill.blocks_used == 0, 2)
