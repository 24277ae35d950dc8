"""A pull that reads blocks after they were reused: its result is discarded."""

import asyncio

import pytest
from support.clients.worker_calls import decode_request
from support.cluster.workers import Running, Starter
from support.eventually import eventually
from support.servers.tcp_proxy import TcpProxy

from baton.errors import HandoffLost
from engine_protocol.fault_injection import FAULT_KEY

SECRET = b"somebody else's prompt, which must not be seen or continued....."


def contents(running: Running) -> set[bytes]:
    """Returns the content of blocks in a worker's pool."""
    memory = running.worker.engine.memory
    return {bytes(view) for block in range(memory.num_blocks) for view in memory.read([block])}


async def test_what_was_read_from_blocks_that_had_been_reused_is_thrown_away(start: Starter) -> None:
    async with (
        start("prefill", lease_seconds=10, num_blocks=8) as prefill,
        start("decode", allow_faults=True) as decode,
        TcpProxy(prefill.calls.address) as between,
    ):
        # The pool is open from here on: shared memory is read without the owner.
        opened = await prefill.calls.prefill("first")
        opened.address = between.address
        assert (await decode.calls.decode(decode_request(opened, "first"))).transport == "shm"

        text = b"a prompt of which nothing is in any cache"
        handoff = await prefill.calls.prefill(text=text)
        handoff.address = between.address
        request = decode_request(handoff, text=text)
        decoding = asyncio.create_task(decode.calls.decode(request, metadata=((FAULT_KEY, "delay=0.5@pull"),)))
        await eventually(lambda: decode.blocks_used > 0)

        # The reader does not notice: its owner ends the lease, and reuses the blocks.
        between.freeze()
        await prefill.worker.leases.release_all()
        for index in range(3):
            await prefill.calls.release(await prefill.calls.prefill(f"other{index}", bytes([48 + index]) + SECRET))
        memory = prefill.worker.engine.memory
        reused = {bytes(view) for block in handoff.block_ids for view in memory.read([block])}
        await eventually(lambda: bool(reused & contents(decode)))

        await between.restore()
        with pytest.raises(HandoffLost, match="did not hold"):
            await decoding
        assert decode.blocks_used == 0

        # None of it can be found by its hash either.
        again = await prefill.calls.prefill("again", text)
        whole = await decode.calls.decode(decode_request(again, "again", text))
        undisturbed = await decode.calls.decode(decode_request(None, "alone", text))
        assert [again.first_token.token_id, *whole.token_ids] == undisturbed.token_ids


async def test_a_pull_that_was_frozen_for_longer_than_the_lease_is_thrown_away(start: Starter) -> None:
    async with start("prefill", lease_seconds=1) as prefill, start("decode", allow_faults=True) as decode:
        handoff = await prefill.calls.prefill()
        # The reader's whole process is frozen and cannot renew; this test shares the process, and is frozen too.
        metadata = ((FAULT_KEY, "freeze=1.5@pull"),)
        with pytest.raises(HandoffLost):
            await decode.calls.decode(decode_request(handoff), metadata=metadata)
        await eventually(lambda: decode.blocks_used == 0 and prefill.blocks_used == 0)
