"""Prefill workers that die, freeze or restart between a prefill and its decode."""

import asyncio
import time
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from support.clients.worker_calls import calls_to, decode_request
from support.cluster.workers import LEASE_SECONDS, Running, Starter, worker_process
from support.eventually import eventually
from support.transports.nixl import NIXL

from baton.engine.v1 import handoff_pb2
from baton.errors import HandoffLost


async def test_an_owner_that_was_killed_loses_its_handoffs(decode: Running, tmp_path: Path) -> None:
    with worker_process("prefill", tmp_path) as owner:
        async with calls_to(owner.address) as calls:
            handoff = await calls.prefill()
            owner.kill()
            with pytest.raises(HandoffLost):
                await decode.calls.decode(decode_request(handoff))


async def test_an_owner_that_freezes_is_given_up_within_its_lease(decode: Running, tmp_path: Path) -> None:
    with worker_process("prefill", tmp_path) as owner:
        async with calls_to(owner.address) as calls:
            handoff = await calls.prefill()
            owner.pause()
            started = time.monotonic()
            with pytest.raises(HandoffLost):
                await decode.calls.decode(decode_request(handoff))
            assert time.monotonic() - started < 10 * LEASE_SECONDS
            await eventually(lambda: decode.blocks_used == 0)


async def test_an_owner_that_freezes_is_not_waited_for_until_a_long_lease_ends(decode: Running, tmp_path: Path) -> None:
    with worker_process("prefill", tmp_path, "handoff.lease_seconds=60") as owner:
        async with calls_to(owner.address) as calls:
            handoff = await calls.prefill()
            owner.pause()
            started = time.monotonic()
            with pytest.raises(HandoffLost):
                await decode.calls.decode(decode_request(handoff))
            assert time.monotonic() - started < 30


async def test_an_owner_that_froze_for_longer_than_a_lease_denies_it(tmp_path: Path) -> None:
    with worker_process("prefill", tmp_path) as owner:
        async with calls_to(owner.address) as calls:
            handoff = await calls.prefill()
            owner.pause()
            await asyncio.sleep(LEASE_SECONDS + 0.2)
            owner.resume()
            assert not (await calls.release(handoff)).still_valid


@pytest.mark.parametrize("transport", ["shm", NIXL, "tcp"])
async def test_processes_hand_over_by_every_transport(start: Starter, tmp_path: Path, transport: str) -> None:
    with worker_process("prefill", tmp_path, f"transports=[{transport}]") as owner:
        async with start("decode", transports=(transport,)) as decode, calls_to(owner.address) as calls:
            decoded = await decode.calls.decode(decode_request(await calls.prefill()))
            whole = await decode.calls.decode(decode_request(None, "whole"))
    assert decoded.transport == transport
    assert decoded.token_ids == whole.token_ids[1:]


@pytest.mark.parametrize("transport", ["shm", NIXL, "tcp"])
async def test_an_owner_whose_pool_was_open_and_that_was_killed_loses_its_handoffs(
    start: Starter, tmp_path: Path, transport: str
) -> None:
    with worker_process("prefill", tmp_path, f"transports=[{transport}]") as owner:
        async with start("decode", transports=(transport,)) as decode, calls_to(owner.address) as calls:
            await decode.calls.decode(decode_request(await calls.prefill()))
            handoff = await calls.prefill("other", b"other" * 10)
            owner.kill()
            with pytest.raises(HandoffLost):
                await decode.calls.decode(decode_request(handoff, "other", b"other" * 10))
            await eventually(lambda: decode.blocks_used == 0, LEASE_SECONDS + 1)


@pytest.mark.parametrize("transport", [NIXL])
async def test_a_restarted_owner_is_read_anew(start: Starter, tmp_path: Path, transport: str) -> None:
    async with start("decode", transports=(transport,)) as decode:
        for life in ("first", "second"):
            with worker_process("prefill", tmp_path, f"transports=[{transport}]") as owner:
                async with calls_to(owner.address) as calls:
                    handoff = await calls.prefill(life, life.encode() * 10)
                    decoded = await decode.calls.decode(decode_request(handoff, life, life.encode() * 10))
                    assert decoded.transport == transport


async def test_an_address_without_a_listener_loses_the_handoff(decode: Running) -> None:
    handoff = handoff_pb2.KvHandoff(
        handoff_id="x" * 32,
        worker_id="gone",
        epoch=1,
        lease=Duration(seconds=1),
        layout_digest=decode.worker.engine.facts.layout.digest,
        num_tokens=5,
        num_bytes=1024,
        block_ids=[1],
        first_token=handoff_pb2.FirstToken(token_id=7),
        address="127.0.0.1:1",
    )
    with pytest.raises(HandoffLost):
        await decode.calls.decode(decode_request(handoff, text=b"hello"))
