"""A handoff from prefill to decode, over the wire: held, kept, pulled, confirmed, freed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from baton.inference.v1 import sampling_pb2, timing_pb2
from support.nixl import NIXL
from support.worker_calls import TEXT, decode_request, until
from support.workers import LEASE_SECONDS, Running, Starter

from rpc.errors import HandoffLost
from services.config import TransportName

TRANSPORTS = ("shm", NIXL, "tcp")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_handed_over_request_gives_the_ids_of_one_that_ran_whole(
    start: Starter, transport: TransportName
) -> None:
    async with start("prefill", transports=(transport,)) as prefill, start("decode", transports=(transport,)) as decode:
        whole = await decode.calls.decode(decode_request(request_id="whole", text=b"other words" + TEXT))
        handoff = await prefill.calls.prefill(text=b"other words" + TEXT)
        rest = await decode.calls.decode(decode_request(handoff, text=b"other words" + TEXT))
        assert [handoff.first_token.token_id, *rest.token_ids] == whole.token_ids


async def test_a_handoff_says_what_is_held_and_where(prefill: Running) -> None:
    handoff = await prefill.calls.prefill()
    assert (handoff.worker_id, handoff.epoch, handoff.address) == (
        prefill.worker.worker_id,
        prefill.worker.epoch,
        prefill.worker.address,
    )
    assert handoff.num_tokens == len(TEXT)
    assert handoff.num_bytes == len(handoff.block_ids) * 1024
    assert len(handoff.block_ids) == prefill.blocks_held == 4
    assert 0 < handoff.lease.ToSeconds() + handoff.lease.nanos / 1e9 <= LEASE_SECONDS


async def test_two_handoffs_have_different_secrets(prefill: Running) -> None:
    one, other = await prefill.calls.prefill("a"), await prefill.calls.prefill("b")
    assert one.handoff_id != other.handoff_id
    assert len(one.handoff_id) >= 22


async def test_a_first_token_that_ends_the_request_leaves_nothing_held(prefill: Running) -> None:
    handoff = await prefill.calls.prefill(max_tokens=1)
    assert handoff.handoff_id == ""
    assert not handoff.block_ids
    assert handoff.first_token.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    assert prefill.blocks_used == 0


async def test_the_held_blocks_are_free_once_decode_has_confirmed(prefill: Running, decode: Running) -> None:
    await decode.calls.decode(decode_request(await prefill.calls.prefill()))
    assert prefill.blocks_used == 0
    assert len(prefill.worker.leases) == 0


async def test_decode_tells_what_it_moved_and_how(prefill: Running, decode: Running) -> None:
    handoff = await prefill.calls.prefill()
    moved = (await decode.calls.decode(decode_request(handoff))).timing(timing_pb2.STAGE_HANDOFF_TRANSFER)
    assert (moved.num_bytes, moved.transport) == (handoff.num_bytes, "shm")


async def test_only_what_decode_has_not_cached_is_moved(prefill: Running, decode: Running) -> None:
    await decode.calls.decode(decode_request(await prefill.calls.prefill()))
    again = await decode.calls.decode(decode_request(await prefill.calls.prefill()))
    assert again.timing(timing_pb2.STAGE_HANDOFF_TRANSFER).num_bytes == 1024


async def test_a_prompt_that_decode_has_whole_moves_nothing(prefill: Running, decode: Running) -> None:
    text = bytes(range(64))
    await decode.calls.decode(decode_request(await prefill.calls.prefill(text=text), text=text))
    again = await decode.calls.decode(decode_request(await prefill.calls.prefill(text=text), text=text))
    assert again.timing(timing_pb2.STAGE_HANDOFF_TRANSFER).num_bytes == 0
    assert again.transport == ""


async def test_without_a_handoff_the_prompt_is_run_where_it_is_decoded(decode: Running) -> None:
    whole = await decode.calls.decode(decode_request())
    assert len(whole.token_ids) == 20
    assert whole.finished is not None
    stages = [timing.stage for timing in whole.finished.timings]
    assert stages == [timing_pb2.STAGE_DECODE_QUEUE, timing_pb2.STAGE_PREFILL_COMPUTE, timing_pb2.STAGE_DECODE]


async def test_a_decode_that_is_continued_goes_on_as_if_never_interrupted(decode: Running) -> None:
    whole = await decode.calls.decode(decode_request())
    rest = await decode.calls.decode(decode_request(emitted=whole.token_ids[:7]))
    assert rest.token_ids == whole.token_ids[7:]


async def test_a_lease_that_nobody_renews_expires_and_frees(prefill: Running) -> None:
    await prefill.calls.prefill()
    assert prefill.blocks_held == 4
    await until(lambda: prefill.blocks_used == 0, LEASE_SECONDS + 1)


async def test_a_release_after_the_lease_is_told_that_it_did_not_hold(prefill: Running) -> None:
    handoff = await prefill.calls.prefill()
    await until(lambda: prefill.blocks_used == 0)
    assert not (await prefill.calls.release(handoff)).still_valid


async def test_a_renewal_after_the_lease_is_told_that_it_did_not_hold(prefill: Running) -> None:
    handoff = await prefill.calls.prefill()
    await until(lambda: prefill.blocks_used == 0)
    assert not (await prefill.calls.renew(handoff)).still_valid


async def test_a_handoff_that_is_renewed_outlives_its_lease(prefill: Running) -> None:
    handoff = await prefill.calls.prefill()
    for _ in range(6):
        await asyncio.sleep(LEASE_SECONDS / 3)
        assert (await prefill.calls.renew(handoff)).still_valid
    released = await prefill.calls.release(handoff)
    assert (released.still_valid, released.blocks_freed) == (True, 4)


async def test_a_second_release_is_answered_like_the_first(prefill: Running) -> None:
    handoff = await prefill.calls.prefill()
    first, second = await prefill.calls.release(handoff), await prefill.calls.release(handoff)
    assert first == second
    assert first.still_valid


async def test_another_reader_of_a_released_handoff_is_denied(prefill: Running) -> None:
    handoff = await prefill.calls.prefill()
    assert (await prefill.calls.release(handoff, "first")).still_valid
    assert not (await prefill.calls.release(handoff, "second")).still_valid


async def test_a_handoff_can_be_decoded_once(prefill: Running, decode: Running) -> None:
    handoff = await prefill.calls.prefill()
    await decode.calls.decode(decode_request(handoff))
    with pytest.raises(HandoffLost):
        await decode.calls.decode(decode_request(handoff))


async def test_decode_never_starts_from_blocks_that_were_freed_and_reused(prefill: Running, decode: Running) -> None:
    handoff = await prefill.calls.prefill()
    await until(lambda: prefill.blocks_used == 0)
    await asyncio.gather(*(prefill.calls.prefill(str(i), bytes([60 + i]) * 200) for i in range(4)))
    with pytest.raises(HandoffLost):
        await decode.calls.decode(decode_request(handoff))


async def test_a_lost_handoff_leaves_nothing_wrong_in_the_readers_cache(prefill: Running, decode: Running) -> None:
    whole = await prefill.calls.prefill()
    await prefill.calls.release(whole)
    with pytest.raises(HandoffLost):
        await decode.calls.decode(decode_request(whole))
    handoff = await prefill.calls.prefill("again")
    moved = await decode.calls.decode(decode_request(handoff))
    assert moved.timing(timing_pb2.STAGE_HANDOFF_TRANSFER).num_bytes == handoff.num_bytes


@asynccontextmanager
async def decode_without_room(start: Starter) -> AsyncIterator[Running]:
    """A decode worker of 8 blocks of which one request has 7, until it is aborted; for five seconds at most."""
    async with start("decode", num_blocks=8, decode_step_seconds=0.2) as decode:
        busy = asyncio.create_task(decode.calls.decode(decode_request(None, "busy", b"b" * 100, max_tokens=28)))
        await until(lambda: decode.blocks_used >= 7)
        yield decode
        await decode.calls.abort("busy")
        await asyncio.gather(busy, return_exceptions=True)


async def test_decode_keeps_the_lease_while_it_waits_for_blocks(start: Starter, prefill: Running) -> None:
    async with decode_without_room(start) as decode:
        handoff = await prefill.calls.prefill(max_tokens=3)
        waiting = asyncio.create_task(decode.calls.decode(decode_request(handoff, max_tokens=3)))
        await asyncio.sleep(2.5 * LEASE_SECONDS)
        assert prefill.blocks_held == 4
        await decode.calls.abort("busy")
        decoded = await waiting
        assert len(decoded.token_ids) == 2
        waited = decoded.timing(timing_pb2.STAGE_HANDOFF_WAIT).duration
        assert waited.ToMilliseconds() > 2000 * LEASE_SECONDS


async def test_a_lease_that_ends_while_decode_waits_ends_the_waiting(start: Starter, prefill: Running) -> None:
    async with decode_without_room(start) as decode:
        handoff = await prefill.calls.prefill()
        waiting = asyncio.create_task(decode.calls.decode(decode_request(handoff)))
        await until(lambda: decode.worker.engine.load().waiting == 1)
        await prefill.calls.release(handoff)
        with pytest.raises(HandoffLost):
            await waiting
        assert decode.worker.engine.load().waiting == 0


async def test_a_decode_that_is_cancelled_while_it_waits_releases_the_handoff_at_once(
    start: Starter, prefill: Running
) -> None:
    async with decode_without_room(start) as decode:
        waiting = asyncio.create_task(decode.calls.decode(decode_request(await prefill.calls.prefill())))
        await until(lambda: decode.worker.engine.load().waiting == 1)
        waiting.cancel()
        await until(lambda: prefill.blocks_used == 0, LEASE_SECONDS / 3)
        assert decode.worker.engine.load().waiting == 0


async def test_cancelling_a_prefill_at_any_point_leaves_nothing_for_longer_than_a_lease(prefill: Running) -> None:
    for pauses in range(20):
        task = asyncio.create_task(prefill.calls.prefill(f"r{pauses}", bytes([pauses + 40]) * 30))
        for _ in range(pauses):
            await asyncio.sleep(0.0002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: prefill.blocks_used == 0, LEASE_SECONDS + 1)


async def test_cancelling_a_decode_at_any_point_frees_both_sides_at_once(prefill: Running, decode: Running) -> None:
    for pauses in range(20):
        handoff = await prefill.calls.prefill(f"r{pauses}", bytes([pauses + 40]) * 30, max_tokens=500)
        request = decode_request(handoff, f"r{pauses}", bytes([pauses + 40]) * 30, max_tokens=500)
        task = asyncio.create_task(decode.calls.decode(request))
        await asyncio.sleep(pauses * 0.0003)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: decode.blocks_used == 0, 1)
    await until(lambda: prefill.blocks_used == 0, LEASE_SECONDS + 1)


async def test_thirty_two_handoffs_at_once_are_all_right(prefill: Running, decode: Running) -> None:
    async def one(index: int) -> bool:
        text = bytes([33 + index]) * 20
        handoff = await prefill.calls.prefill(f"r{index}", text)
        rest = await decode.calls.decode(decode_request(handoff, f"r{index}", text))
        whole = await decode.calls.decode(decode_request(None, f"w{index}", text))
        return [handoff.first_token.token_id, *rest.token_ids] == whole.token_ids

    assert all(await asyncio.gather(*map(one, range(32))))
