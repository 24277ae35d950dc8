"""Pools of registered prefill workers, opened before the first handoff; and peers that vanish, lie or hang."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from support.clients.worker_calls import decode_request
from support.cluster.workers import Running, Starter
from support.eventually import eventually
from support.servers.held_handoff_service import HeldBack, held_back

from baton.engine.v1 import handoff_pb2
from discovery.record import Location, WorkerRecord
from runtime.aio import timeout
from services.handoff.opening import MOST_PEERS, START_SECONDS, nearest_owners


def record_of(running: Running, address: str) -> WorkerRecord:
    [record] = [one for one in running.registry.workers() if one.worker_id == running.worker.worker_id]
    return replace(record, worker_id=f"{record.worker_id}-at-{address}", address=address)


@asynccontextmanager
async def watched_owner(start: Starter, prefill: Running) -> AsyncIterator[HeldBack]:
    """The owner, registered a second time at an address where its GetPool is seen."""
    async with held_back(prefill.calls, "GetPool") as owner, start.registry.register(record_of(prefill, owner.address)):
        yield owner


async def handed_over(prefill: Running, decode: Running, address: str, text: bytes) -> str:
    """Hands over from the owner at this address; returns the transport."""
    handoff = await prefill.calls.prefill(text.decode(), text)
    there = handoff_pb2.KvHandoff()
    there.CopyFrom(handoff)
    there.address = address
    return (await decode.calls.decode(decode_request(there, text.decode(), text))).transport


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_worker_that_joins_has_opened_the_pools_of_its_peers(start: Starter, transport: str) -> None:
    async with start("prefill", transports=(transport,)) as prefill, watched_owner(start, prefill) as owner:
        owner.let_go.set()
        async with start("decode", transports=(transport,)) as decode:
            assert owner.asked.is_set()
            owner.asked.clear()
            assert await handed_over(prefill, decode, owner.address, b"first handoff" * 9) == transport
            assert not owner.asked.is_set()


async def test_the_pool_of_a_peer_that_joins_later_is_opened_before_a_handoff(
    start: Starter, prefill: Running, decode: Running
) -> None:
    async with watched_owner(start, prefill) as owner:
        async with timeout(50):
            await owner.asked.wait()
        owner.let_go.set()
        owner.asked.clear()
        assert await handed_over(prefill, decode, owner.address, b"first handoff" * 9) == "shm"
        assert not owner.asked.is_set()


async def test_a_pool_that_was_forgotten_is_opened_again_without_a_handoff(
    start: Starter, prefill: Running, decode: Running
) -> None:
    async with watched_owner(start, prefill) as owner:
        owner.let_go.set()
        await eventually(owner.asked.is_set)
        lost = await prefill.calls.prefill()
        await prefill.calls.release(lost)
        lost.address = owner.address
        owner.asked.clear()
        with pytest.raises(Exception, match="lost"):
            await decode.calls.decode(decode_request(lost))
        await eventually(owner.asked.is_set)


async def test_peers_that_hang_do_not_keep_a_worker_from_being_ready(start: Starter, prefill: Running) -> None:
    async with watched_owner(start, prefill) as owner:
        started = time.monotonic()
        async with start("decode") as decode:
            assert time.monotonic() - started < 10 * START_SECONDS
            assert owner.asked.is_set()
            text = b"another owner" * 9
            await handed_over(prefill, decode, prefill.worker.address, text)


@pytest.mark.parametrize(
    "lie", [{"address": "127.0.0.1:1"}, {"address": "no address"}, {"epoch": 7}, {"address": ""}], ids=str
)
async def test_peers_that_are_not_there_delay_nothing(start: Starter, prefill: Running, lie: dict[str, object]) -> None:
    [record] = start.registry.workers()
    wrong = replace(record, worker_id="wrong", **lie)  # type: ignore[arg-type]
    async with start.registry.register(wrong):
        started = time.monotonic()
        async with start("decode") as decode:
            assert time.monotonic() - started < 10 * START_SECONDS
            assert await handed_over(prefill, decode, prefill.worker.address, b"of a good one" * 9) == "shm"


async def test_peers_that_vanish_are_not_asked_any_longer(start: Starter, prefill: Running) -> None:
    async with held_back(prefill.calls, "GetPool") as owner, start("decode"):
        async with start.registry.register(record_of(prefill, owner.address)):
            await eventually(owner.asked.is_set)
        await eventually(owner.given_up.is_set, 3)


def test_of_very_many_peers_the_nearest_are_opened_and_no_more(prefill_record: WorkerRecord) -> None:
    near, far = Location("zone", "rack", "host"), Location("zone", "other", "elsewhere")
    peers = [
        replace(prefill_record, worker_id=f"p{index}", epoch=index, location=near if index < 10 else far)
        for index in range(5000)
    ]
    reader = replace(prefill_record, worker_id="reader", roles=("decode",), location=near)
    chosen = nearest_owners(reader, peers)
    assert len(chosen) == MOST_PEERS
    assert {peer.worker_id for peer in chosen} >= {f"p{index}" for index in range(10)}
    other = nearest_owners(replace(reader, worker_id="another"), peers)
    assert {peer.worker_id for peer in chosen} != {peer.worker_id for peer in other}


@pytest.mark.parametrize(
    "change", [{"draining": True}, {"model": "another"}, {"layout_digest": "another"}, {"roles": ("encode",)}], ids=str
)
def test_peers_that_hand_nothing_over_are_left_out(prefill_record: WorkerRecord, change: dict[str, object]) -> None:
    reader = replace(prefill_record, worker_id="reader", roles=("decode",))
    assert nearest_owners(reader, [prefill_record]) == [prefill_record]
    assert not nearest_owners(reader, [replace(prefill_record, **change)])  # type: ignore[arg-type]
    assert not nearest_owners(prefill_record, [prefill_record])


@pytest.fixture
def prefill_record() -> WorkerRecord:
    return WorkerRecord(
        worker_id="p",
        epoch=1,
        address="127.0.0.1:1",
        roles=("prefill",),
        model="demo",
        engine="simulated",
        layout_digest="layout",
        max_context_tokens=100,
    )
