"""Fault plans, and their effect on a request on a worker that allows them."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.clients.worker_calls import Decoded, calls_to, decode_request
from support.cluster.workers import LEASE_SECONDS, Running, Starter, worker_process
from support.eventually import PATIENCE_SECONDS, eventually
from support.lifetimes import in_one_task

from baton.calls import stream
from baton.engine.v1 import decode_pb2
from baton.errors import EngineFailed, HandoffLost, InvalidRequest, PermissionDenied, Unavailable
from engine_protocol.fault_injection import FAULT_KEY, Fault, parse
from runtime.aio import timeout


@pytest.fixture
async def prefill(start: Starter) -> AsyncIterator[Running]:
    async with in_one_task(start("prefill", allow_faults=True)) as running:
        yield running
        running.let_a_lease_pass()
        await eventually(lambda: running.blocks_used == 0, LEASE_SECONDS / 2)


@pytest.fixture
async def decode(start: Starter) -> AsyncIterator[Running]:
    async with in_one_task(start("decode", allow_faults=True)) as running:
        yield running
        await eventually(lambda: running.blocks_used == 0, LEASE_SECONDS / 2)


def test_a_plan_says_what_where_and_when() -> None:
    assert parse("crash@decode:7, delay=0.5@pull;attempt=2") == (
        Fault("crash", "decode", "decode", token=7),
        Fault("delay", "pull", "decode", seconds=0.5, attempt=2),
    )


def test_a_queue_is_prefills_unless_another_role_is_named() -> None:
    assert [fault.role for fault in parse("hang@queue, hang@queue;role=decode")] == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ("explode@decode", "expected one of crash"),
        ("crash@lunch", "one of admission"),
        ("crash", "expected one of"),
        ("crash@decode;when=now", "the options are role, attempt, p and seed"),
        ("crash@pull;role=prefill", "not a point of the role"),
        ("delay@pull", "need seconds"),
        ("crash=3@pull", "need seconds"),
        ("delay=x@pull", "'x' is not a number"),
        ("delay=-1@pull", "out of range"),
        ("corrupt@decode", "only what moves at held, lent, pull can be corrupted"),
        ("crash@route", "a router can only delay or hang"),
        ("delay=1@queue;role=router", "not a point of the role"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_saying_why(plan: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        parse(plan)


def test_chance_is_the_same_for_the_same_seed_and_request() -> None:
    [fault] = parse("drop@decode;p=0.3;seed=5")
    struck = [fault.applies_to(f"request-{number}") for number in range(1000)]
    assert struck == [fault.applies_to(f"request-{number}") for number in range(1000)]
    assert 250 < sum(struck) < 350
    [other] = parse("drop@decode;p=0.3;seed=6")
    assert struck != [other.applies_to(f"request-{number}") for number in range(1000)]


async def run(prefill: Running, decode: Running, plan: str, seconds: float = 20) -> Decoded:
    """A prefill and the decode of its handoff, both with the same plan."""
    metadata = ((FAULT_KEY, plan),)
    handoff = await prefill.calls.prefill(metadata=metadata)
    async with timeout(seconds):
        return await decode.calls.decode(decode_request(handoff), metadata=metadata)


async def test_a_worker_that_does_not_allow_it_refuses_a_plan(start: Starter) -> None:
    async with start("prefill") as worker:
        with pytest.raises(PermissionDenied, match="allow_faults"):
            await worker.calls.prefill(metadata=((FAULT_KEY, "drop@prefill"),))


@pytest.mark.parametrize("point", ["queue", "prefill"])
async def test_a_dropped_prefill_is_a_worker_that_went_away(prefill: Running, point: str) -> None:
    with pytest.raises(Unavailable, match=point):
        await prefill.calls.prefill(metadata=((FAULT_KEY, f"drop@{point}"),))
    assert prefill.blocks_used == 0


@pytest.mark.parametrize("plan", ["drop@held", "drop@pull", "drop@confirm"])
async def test_a_dropped_handoff_is_lost(prefill: Running, decode: Running, plan: str) -> None:
    with pytest.raises(HandoffLost):
        await run(prefill, decode, plan)


@pytest.mark.parametrize("plan", ["corrupt@held", "corrupt@pull"])
async def test_corrupt_kv_is_noticed(prefill: Running, decode: Running, plan: str) -> None:
    with pytest.raises(EngineFailed, match="does not belong"):
        await run(prefill, decode, plan)


async def ids_until_it_drops(decode: Running, request: decode_pb2.DecodeRequest, plan: str) -> list[int]:
    """The tokens of a decode before it failed."""
    received: list[int] = []
    try:
        async for answer in stream(decode.calls.decodes.Decode(request, metadata=((FAULT_KEY, plan),))):
            received += answer.tokens.token_ids
    except Unavailable:
        return received
    raise AssertionError("it did not fail")


async def test_a_drop_at_a_token_comes_after_that_token(decode: Running) -> None:
    assert len(await ids_until_it_drops(decode, decode_request(), "drop@decode:7")) == 7


async def test_a_token_counts_from_the_start_of_the_answer(decode: Running) -> None:
    whole = (await decode.calls.decode(decode_request())).token_ids
    request = decode_request(emitted=whole[:5])
    assert await ids_until_it_drops(decode, request, "drop@decode:7") == whole[5:7]


async def test_a_delay_is_one(prefill: Running) -> None:
    started = asyncio.get_running_loop().time()
    await prefill.calls.release(await prefill.calls.prefill(metadata=((FAULT_KEY, "delay=0.3@prefill"),)))
    assert asyncio.get_running_loop().time() - started >= 0.3


@pytest.mark.parametrize("point", ["queue", "prefill", "held"])
async def test_a_hang_lasts_until_it_is_cancelled(prefill: Running, point: str) -> None:
    request = asyncio.create_task(prefill.calls.prefill(metadata=((FAULT_KEY, f"hang@{point}"),)))
    await eventually(lambda: prefill.worker.drainer.progress.running == 1)
    await asyncio.sleep(0.2)
    assert not request.done()
    assert (await prefill.calls.abort()).found
    await asyncio.gather(request, return_exceptions=True)
    await eventually(lambda: prefill.blocks_used == 0)


async def test_only_the_attempt_that_is_meant_is_struck(prefill: Running) -> None:
    for attempt, plan in ((2, "drop@prefill"), (1, "drop@prefill;attempt=2")):
        metadata = ((FAULT_KEY, plan), ("x-baton-attempt", str(attempt)))
        await prefill.calls.release(await prefill.calls.prefill(metadata=metadata))
    with pytest.raises(Unavailable):
        await prefill.calls.prefill(metadata=((FAULT_KEY, "drop@prefill;attempt=any"), ("x-baton-attempt", "3")))


async def test_a_crash_is_the_processs(tmp_path: Path) -> None:
    engine = "engine={kind: simulated, allow_faults: true}"
    with worker_process("decode", tmp_path, engine) as worker:
        async with calls_to(worker.address) as calls:
            with pytest.raises(Unavailable):
                await calls.decode(decode_request(), metadata=((FAULT_KEY, "crash@decode:3"),))
        assert await asyncio.to_thread(worker.popen.wait, PATIENCE_SECONDS) == -signal.SIGKILL


async def test_a_frozen_worker_answers_no_call(tmp_path: Path) -> None:
    engine = "engine={kind: simulated, allow_faults: true}"
    with worker_process("decode", tmp_path, engine) as worker:
        async with calls_to(worker.address) as calls:
            started = asyncio.get_running_loop().time()
            request = calls.decodes.Decode(decode_request(), metadata=((FAULT_KEY, "freeze=1@decode:3"),))
            await request.read()
            await asyncio.sleep(0.2)
            await calls.abort("unknown")
            # It is answered after the freeze, however late it was asked.
            assert asyncio.get_running_loop().time() - started >= 1.0
