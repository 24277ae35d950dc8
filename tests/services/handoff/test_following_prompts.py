"""The calls of early handoffs, as routers and decode workers make them: what is refused, lost, left and never taken."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TypeAlias

import pytest
import pytest_asyncio
from support.clients.worker_calls import WorkerCalls, decode_request, prompt
from support.clock import ManualClock
from support.cluster.workers import Running, Starter
from support.engines.gated_prefill import GatedProgress, open_gated
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import stream, unary
from baton.engine.v1 import decode_pb2, handoff_pb2
from baton.errors import HandoffLost, InvalidRequest, RequestExists, StaleEpoch
from services.handoff import early

LEASE_SECONDS = 5.0
CHUNK = 64
TEXT = bytes(range(10, 210))
OTHER_TEXT = bytes(reversed(TEXT))
BLOCKS = -(-len(TEXT) // 16)
EARLY_BLOCKS = len(TEXT) // CHUNK * CHUNK // 16

Prefill: TypeAlias = "asyncio.Task[handoff_pb2.KvHandoff]"


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[GatedProgress]:
    return open_gated(monkeypatch)


@pytest.fixture
def clock() -> ManualClock:
    """The clock of the prefill worker's leases."""
    return ManualClock()


@pytest_asyncio.fixture
async def owner(start: Starter, engines: list[GatedProgress], clock: ManualClock) -> AsyncIterator[Running]:
    async with start("prefill", lease_seconds=LEASE_SECONDS, clock=clock, prefill_chunk_tokens=CHUNK) as running:
        yield running
        await running.worker.leases.release_all()
        await eventually(lambda: running.blocks_used == 0)


@pytest_asyncio.fixture
async def reader(start: Starter, owner: Running) -> AsyncIterator[Running]:
    async with start("decode", lease_seconds=LEASE_SECONDS) as running:
        yield running
        await eventually(lambda: running.blocks_used == 0)


def _prefetch_request(owner: Running, text: bytes = TEXT) -> decode_pb2.PrefetchRequest:
    return decode_pb2.PrefetchRequest(
        request_id="r",
        prompt=prompt(text),
        prefill_worker_id=owner.worker.worker_id,
        prefill_epoch=owner.worker.epoch,
        prefill_address=owner.worker.address,
    )


async def _prefetch(calls: WorkerCalls, request: decode_pb2.PrefetchRequest) -> decode_pb2.PrefetchResponse:
    response: decode_pb2.PrefetchResponse = await unary(calls.decodes.Prefetch(request, timeout=PATIENCE_SECONDS))
    return response


def _prefill(owner: Running) -> Prefill:
    return asyncio.create_task(owner.calls.prefill(text=TEXT))


async def _read(owner: Running, reader: Running) -> None:
    """Returns once the decode worker reads what is computed."""
    await eventually(lambda: len(owner.worker.leases.held) == 1)
    await eventually(lambda: reader.blocks_used == BLOCKS)


async def _right_ids(reader: Running) -> list[int]:
    return (await reader.calls.decode(decode_request(request_id="whole", text=TEXT))).token_ids


async def test_what_was_read_is_taken_by_the_decode(
    owner: Running, reader: Running, engines: list[GatedProgress]
) -> None:
    prefilling = _prefill(owner)
    reading = asyncio.create_task(_prefetch(reader.calls, _prefetch_request(owner)))
    await _read(owner, reader)
    [lease] = owner.worker.leases.held
    engines[0].gate.set()
    handoff = await prefilling
    assert handoff.handoff_id == lease.handoff_id
    decoded = await reader.calls.decode(decode_request(handoff, text=TEXT))
    assert [handoff.first_token.token_id, *decoded.token_ids] == await _right_ids(reader)
    response = await reading
    assert response.is_taken
    assert 0 < response.num_bytes <= EARLY_BLOCKS * 1024
    assert len(owner.worker.leases) == 0


async def test_what_no_decode_takes_is_freed_after_a_lease(
    owner: Running, reader: Running, engines: list[GatedProgress]
) -> None:
    prefilling = _prefill(owner)
    reading = asyncio.create_task(_prefetch(reader.calls, _prefetch_request(owner)))
    await _read(owner, reader)
    engines[0].gate.set()
    await prefilling
    assert not (await reading).is_taken
    assert reader.blocks_used == 0


async def test_another_prompt_of_that_length_is_not_taken(
    owner: Running, reader: Running, engines: list[GatedProgress]
) -> None:
    prefilling = _prefill(owner)
    reading = asyncio.create_task(_prefetch(reader.calls, _prefetch_request(owner, OTHER_TEXT)))
    await _read(owner, reader)
    engines[0].gate.set()
    handoff = await prefilling
    decoded = await reader.calls.decode(decode_request(handoff, text=TEXT))
    assert [handoff.first_token.token_id, *decoded.token_ids] == await _right_ids(reader)
    reading.cancel()


async def test_a_reader_that_leaves_gives_up_its_lease_and_not_the_prompt(
    owner: Running, reader: Running, engines: list[GatedProgress]
) -> None:
    prefilling = _prefill(owner)
    reading = asyncio.create_task(_prefetch(reader.calls, _prefetch_request(owner)))
    await _read(owner, reader)
    [lease] = owner.worker.leases.held
    reading.cancel()
    await eventually(lambda: len(owner.worker.leases) == 0)
    await eventually(lambda: reader.blocks_used == 0)
    engines[0].gate.set()
    handoff = await prefilling
    assert handoff.handoff_id != lease.handoff_id
    decoded = await reader.calls.decode(decode_request(handoff, text=TEXT))
    assert [handoff.first_token.token_id, *decoded.token_ids] == await _right_ids(reader)


async def test_a_lease_that_expires_while_the_prompt_is_computed_is_lost(
    owner: Running, reader: Running, engines: list[GatedProgress], clock: ManualClock
) -> None:
    prefilling = _prefill(owner)
    reading = asyncio.create_task(_prefetch(reader.calls, _prefetch_request(owner)))
    await _read(owner, reader)
    [lease] = owner.worker.leases.held
    clock.advance(LEASE_SECONDS + 0.1)
    with pytest.raises(HandoffLost):
        await reading
    await eventually(lambda: reader.blocks_used == 0)
    engines[0].gate.set()
    assert (await prefilling).handoff_id != lease.handoff_id


async def test_an_aborted_prompt_is_lost_to_its_reader(owner: Running, reader: Running) -> None:
    prefilling = _prefill(owner)
    reading = asyncio.create_task(_prefetch(reader.calls, _prefetch_request(owner)))
    await _read(owner, reader)
    await owner.calls.abort("r")
    with pytest.raises(HandoffLost):
        await reading
    await asyncio.gather(prefilling, return_exceptions=True)
    await eventually(lambda: owner.blocks_used == reader.blocks_used == 0)


async def test_an_abort_on_the_decode_worker_frees_what_was_read(owner: Running, reader: Running) -> None:
    prefilling = _prefill(owner)
    reading = asyncio.create_task(_prefetch(reader.calls, _prefetch_request(owner)))
    await _read(owner, reader)
    receipt = await reader.calls.abort("r")
    assert (receipt.blocks_freed, reader.blocks_used) == (BLOCKS, 0)
    await asyncio.gather(reading, return_exceptions=True)
    prefilling.cancel()


async def test_a_prompt_has_one_reader(owner: Running, reader: Running) -> None:
    prefilling = _prefill(owner)
    reading = asyncio.create_task(_prefetch(reader.calls, _prefetch_request(owner)))
    await _read(owner, reader)
    with pytest.raises(RequestExists):
        await _follow(owner, owner.worker.epoch)
    reading.cancel()
    prefilling.cancel()


async def _follow(owner: Running, epoch: int) -> None:
    request = handoff_pb2.FollowRequest(request_id="r", epoch=epoch)
    async with aclosing(stream(owner.calls.handoffs.Follow(request, timeout=PATIENCE_SECONDS))) as told:
        async for _ in told:
            pass


async def test_a_prompt_that_never_comes_is_lost(
    owner: Running, reader: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "_ARRIVAL_SECONDS", 0.01)
    with pytest.raises(HandoffLost, match="no such prompt"):
        await _prefetch(reader.calls, _prefetch_request(owner))


async def test_another_process_of_the_prefill_worker_is_not_followed(owner: Running, reader: Running) -> None:
    request = _prefetch_request(owner)
    request.prefill_epoch += 1
    with pytest.raises(StaleEpoch):
        await _prefetch(reader.calls, request)


async def test_a_request_that_does_not_say_whom_to_follow_is_refused(reader: Running) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await _prefetch(reader.calls, decode_pb2.PrefetchRequest(request_id="r", prompt=prompt(TEXT)))
    assert {violation.field for violation in refused.value.violations} == {"prefill_worker_id", "prefill_address"}


async def test_a_prompt_of_another_length_is_refused(owner: Running, reader: Running) -> None:
    prefilling = _prefill(owner)
    with pytest.raises(InvalidRequest) as refused:
        await _prefetch(reader.calls, _prefetch_request(owner, TEXT[:-1]))
    assert [violation.field for violation in refused.value.violations] == ["prompt.token_ids"]
    prefilling.cancel()
