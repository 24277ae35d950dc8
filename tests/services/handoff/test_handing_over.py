"""A handoff from prefill to decode, over the wire: held, renewed, pulled, confirmed, freed."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs
from support.clients.scraping import since
from support.clients.worker_calls import TEXT, decode_request
from support.clock import ManualClock
from support.cluster.workers import LEASE_SECONDS, Running, Starter
from support.eventually import eventually
from support.transports.nixl import NIXL

from baton.errors import HandoffLost
from baton.inference.v1 import sampling_pb2, timing_pb2
from engine_protocol.fault_injection import FAULT_KEY
from services.config import HandoffConfig

TRANSPORTS = ("shm", NIXL, "tcp")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_handed_over_request_gives_the_ids_of_one_that_ran_whole(start: Starter, transport: str) -> None:
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
    handoff = await prefill.calls.prefill()
    moved = (await decode.calls.decode(decode_request(handoff))).timing(timing_pb2.STAGE_HANDOFF_TRANSFER)
    assert (moved.num_bytes, moved.cached_bytes) == (1024, handoff.num_bytes - 1024)


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


async def test_a_lease_that_is_not_renewed_expires_and_frees_its_blocks(prefill: Running) -> None:
    await prefill.calls.prefill()
    assert prefill.blocks_held == 4
    await eventually(lambda: prefill.blocks_used == 0, LEASE_SECONDS + 1)


async def test_a_release_after_the_lease_is_told_that_it_did_not_hold(prefill: Running) -> None:
    handoff = await prefill.calls.prefill()
    prefill.let_a_lease_pass()
    await eventually(lambda: prefill.blocks_used == 0)
    assert not (await prefill.calls.release(handoff)).still_valid


async def test_a_renewal_after_the_lease_is_told_that_it_did_not_hold(prefill: Running) -> None:
    handoff = await prefill.calls.prefill()
    prefill.let_a_lease_pass()
    await eventually(lambda: prefill.blocks_used == 0)
    assert not (await prefill.calls.renew(handoff)).still_valid


async def test_a_handoff_that_is_renewed_outlives_its_lease(start: Starter) -> None:
    clock = ManualClock()
    async with start("prefill", clock=clock) as prefill:
        handoff = await prefill.calls.prefill()
        for _ in range(6):
            clock.advance(LEASE_SECONDS * 0.9)
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
    prefill.let_a_lease_pass()
    await eventually(lambda: prefill.blocks_used == 0)
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
    """A decode worker of 8 blocks, 7 of them used by a request until it is aborted; for five seconds at most."""
    async with start("decode", num_blocks=8, decode_step_seconds=0.2) as decode:
        busy = asyncio.create_task(decode.calls.decode(decode_request(None, "busy", b"b" * 100, max_tokens=28)))
        await eventually(lambda: decode.blocks_used >= 7)
        yield decode
        await decode.calls.abort("busy")
        await asyncio.gather(busy, return_exceptions=True)


async def test_decode_keeps_the_lease_while_it_waits_for_blocks(start: Starter) -> None:
    clock = ManualClock()
    async with start("prefill", clock=clock) as prefill, decode_without_room(start) as decode:
        handoff = await prefill.calls.prefill(max_tokens=3)
        [lease] = prefill.worker.leases.held
        waiting = asyncio.create_task(decode.calls.decode(decode_request(handoff, max_tokens=3)))
        for _ in range(3):
            clock.advance(LEASE_SECONDS * 0.9)
            await eventually(lambda: lease.remaining_seconds == LEASE_SECONDS)
        assert prefill.blocks_held == 4
        await decode.calls.abort("busy")
        decoded = await waiting
        assert len(decoded.token_ids) == 2
        assert decoded.timing(timing_pb2.STAGE_HANDOFF_WAIT).duration.ToMilliseconds() > 0


async def test_a_lease_that_ends_while_decode_waits_ends_the_waiting(start: Starter, prefill: Running) -> None:
    async with decode_without_room(start) as decode:
        handoff = await prefill.calls.prefill()
        waiting = asyncio.create_task(decode.calls.decode(decode_request(handoff)))
        await eventually(lambda: decode.worker.engines.load().waiting == 1)
        await prefill.calls.release(handoff)
        with pytest.raises(HandoffLost):
            await waiting
        assert decode.worker.engines.load().waiting == 0


async def test_a_decode_that_is_cancelled_while_it_waits_releases_the_handoff_at_once(
    start: Starter, prefill: Running
) -> None:
    async with decode_without_room(start) as decode:
        waiting = asyncio.create_task(decode.calls.decode(decode_request(await prefill.calls.prefill())))
        await eventually(lambda: decode.worker.engines.load().waiting == 1)
        waiting.cancel()
        await eventually(lambda: prefill.blocks_used == 0, LEASE_SECONDS / 2)
        assert decode.worker.engines.load().waiting == 0


@pytest.mark.parametrize("point", ["queue", "prefill", "held"])
async def test_cancelling_a_prefill_at_any_point_frees_what_it_has(start: Starter, point: str) -> None:
    async with start("prefill", allow_faults=True, clock=ManualClock()) as prefill:
        with capture_logs() as logged:
            metadata = ((FAULT_KEY, f"hang@{point}"),)
            task = asyncio.create_task(prefill.calls.prefill(max_tokens=500, metadata=metadata))
            await eventually(lambda: _has_struck(logged, point))
            assert prefill.blocks_used == (0 if point == "queue" else 4)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        # No lease expires while the clock stands still, so expiry did not free them.
        await eventually(lambda: prefill.blocks_used == 0)


@pytest.mark.parametrize("point", ["queue;role=decode", "reserve", "pull", "confirm", "decode:3"])
async def test_cancelling_a_decode_at_any_point_frees_both_sides(start: Starter, point: str) -> None:
    clock = ManualClock()
    async with start("prefill", clock=clock) as prefill, start("decode", allow_faults=True) as decode:
        with capture_logs() as logged:
            request = decode_request(await prefill.calls.prefill(max_tokens=500), max_tokens=500)
            task = asyncio.create_task(decode.calls.decode(request, metadata=((FAULT_KEY, f"hang@{point}"),)))
            await eventually(lambda: _has_struck(logged, re.split("[:;]", point)[0]))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: decode.blocks_used == 0)
        if point.startswith("queue"):
            # Decode has not read the handoff yet: its router releases it, or the lease expires.
            assert prefill.blocks_held == 4
            clock.advance(LEASE_SECONDS)
        await eventually(lambda: prefill.blocks_used == 0)


def _has_struck(logged: Sequence[Mapping[str, object]], point: str) -> bool:
    return any(entry["event"] == "injected fault" and entry["point"] == point for entry in logged)


async def test_thirty_two_handoffs_at_once_are_all_right(start: Starter, decode: Running) -> None:
    # Both workers compute in this process: on a busy machine all of it may take longer than a lease of one second.
    async with start("prefill", lease_seconds=20) as prefill:

        async def one(index: int) -> bool:
            text = bytes([33 + index]) * 20
            handoff = await prefill.calls.prefill(f"r{index}", text)
            rest = await decode.calls.decode(decode_request(handoff, f"r{index}", text))
            whole = await decode.calls.decode(decode_request(None, f"w{index}", text))
            return [handoff.first_token.token_id, *rest.token_ids] == whole.token_ids

        assert all(await asyncio.gather(*map(one, range(32))))


async def test_a_handoff_that_is_checked_and_damaged_is_lost(start: Starter) -> None:
    compared = {outcome: since("baton_handoff_checks_total", outcome=outcome) for outcome in ("equal", "damaged")}
    checking = HandoffConfig(lease_seconds=LEASE_SECONDS, verify="always")
    async with start("prefill") as prefill, start("decode", handoff=checking, allow_faults=True) as decode:
        handoff = await prefill.calls.prefill()
        with pytest.raises(HandoffLost, match="did not arrive as it was sent"):
            await decode.calls.decode(decode_request(handoff), [(FAULT_KEY, "corrupt@pull")])
        await eventually(lambda: decode.blocks_used == prefill.blocks_used == 0)
        whole = await decode.calls.decode(decode_request(await prefill.calls.prefill()))
        assert len(whole.token_ids) == 19
        assert [each.grown for each in compared.values()] == [1, 1]


def test_off_may_be_written_as_yaml_reads_it() -> None:
    assert HandoffConfig.model_validate({"verify": False}).check_every == 0
    assert HandoffConfig.model_validate({"verify": "always"}).check_every == 1


async def test_of_so_many_handoffs_one_is_checked(start: Starter) -> None:
    equal = since("baton_handoff_checks_total", outcome="equal")
    sampling = HandoffConfig(lease_seconds=LEASE_SECONDS, verify="sample", verify_every=3)
    async with start("prefill") as prefill, start("decode", handoff=sampling) as decode:
        for number in range(7):
            text = bytes([number]) * 50
            handoff = await prefill.calls.prefill(text=text)
            await decode.calls.decode(decode_request(handoff, text=text))
    assert equal.grown == 2
