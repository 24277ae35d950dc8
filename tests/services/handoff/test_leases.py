"""The lease table alone, with the simulated engine's KV."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import pytest
from support.clock import ManualClock
from support.eventually import eventually
from support.lifetimes import in_one_task

from services.engines.prompt import Prompt, Sampling
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.engine import SimulatedEngine
from services.handoff import leases
from services.handoff.leases import Lease, LeaseTable


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    async with in_one_task(SimulatedEngine(SimulatedConfig(num_blocks=64, block_bytes=64))) as opened:
        yield opened
        assert opened.load().blocks_used == 0


async def hold(engine: SimulatedEngine, table: LeaseTable, request_id: str = "r") -> Lease:
    kv = await engine.prefill(Prompt(tuple(range(40))), Sampling(max_tokens=5, seed=1))
    return table.hold(request_id, kv, engine.facts.layout.digest)


async def test_closing_the_table_frees_what_is_held(engine: SimulatedEngine) -> None:
    async with LeaseTable(10) as table:
        await hold(engine, table)
    assert engine.load().blocks_used == 0


async def test_leases_expire_in_the_order_of_their_last_renewal(engine: SimulatedEngine) -> None:
    clock = ManualClock()
    async with LeaseTable(10, clock) as table:
        first, second = await hold(engine, table, "first"), await hold(engine, table, "second")
        clock.advance(6)
        assert table.renew(first.handoff_id) == 10
        clock.advance(6)
        await eventually(lambda: len(table) == 1)
        assert table.held == (first,)
        assert not (await table.release(second.handoff_id)).still_valid


async def test_a_lease_frees_its_blocks_when_it_is_over_and_not_before(engine: SimulatedEngine) -> None:
    clock = ManualClock()
    async with LeaseTable(10, clock) as table:
        lease = await hold(engine, table)
        clock.advance(9.999)
        assert await table_is_quiet(table) == (lease,)
        clock.advance(0.001)
        await eventually(lambda: engine.load().blocks_used == 0)


async def test_a_lease_that_is_renewed_in_time_never_ends(engine: SimulatedEngine) -> None:
    clock = ManualClock()
    async with LeaseTable(10, clock) as table:
        lease = await hold(engine, table)
        for _ in range(50):
            clock.advance(9)
            assert await table_is_quiet(table) == (lease,)
            assert table.renew(lease.handoff_id) == 10
        assert lease.age_seconds == 450


async def table_is_quiet(table: LeaseTable) -> tuple[Lease, ...]:
    """The holdings after all runnable tasks have run: the table then waits for its clock only."""
    for _ in range(10):
        await asyncio.sleep(0)
    return table.held


async def test_a_lease_that_is_over_is_not_renewed_even_if_its_blocks_are_not_freed_yet(
    engine: SimulatedEngine,
) -> None:
    clock = ManualClock()
    async with LeaseTable(10, clock) as table:
        lease = await hold(engine, table)
        clock.advance(10)
        assert table.renew(lease.handoff_id) == 0.0


async def test_a_lease_that_is_over_is_not_confirmed_even_if_its_blocks_are_not_freed_yet(
    engine: SimulatedEngine,
) -> None:
    clock = ManualClock()
    async with LeaseTable(10, clock) as table:
        lease = await hold(engine, table)
        clock.advance(10)
        released = await table.release(lease.handoff_id)
        assert (released.still_valid, released.blocks_freed) == (False, 3)


async def test_two_releases_at_once_get_one_answer(engine: SimulatedEngine) -> None:
    async with LeaseTable(10) as table:
        lease = await hold(engine, table)
        answers = await asyncio.gather(*(table.release(lease.handoff_id, "me") for _ in range(2)))
        assert [(answer.still_valid, answer.blocks_freed) for answer in answers] == [(True, 3)] * 2


async def test_of_two_readers_at_once_only_one_is_confirmed(engine: SimulatedEngine) -> None:
    async with LeaseTable(10) as table:
        lease = await hold(engine, table)
        answers = await asyncio.gather(*(table.release(lease.handoff_id, reader) for reader in ("me", "you")))
        assert [answer.still_valid for answer in answers] == [True, False]


async def test_a_release_that_is_cancelled_frees_all_the_same(engine: SimulatedEngine) -> None:
    async with LeaseTable(10) as table:
        lease = await hold(engine, table)
        task = asyncio.create_task(table.release(lease.handoff_id))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: engine.load().blocks_used == 0)


async def test_released_ids_are_not_remembered_for_ever(engine: SimulatedEngine) -> None:
    async with LeaseTable(10) as table:
        first = await hold(engine, table)
        await table.release(first.handoff_id)
        for _ in range(leases._REMEMBERED):
            await table.release((await hold(engine, table)).handoff_id)
        assert not (await table.release(first.handoff_id)).still_valid


async def test_a_remembered_answer_keeps_nothing_of_its_request(engine: SimulatedEngine) -> None:
    async with LeaseTable(10) as table:
        lease = await hold(engine, table)
        before = asyncio.all_tasks()
        releasing = asyncio.create_task(table.release(lease.handoff_id))
        await asyncio.sleep(0)
        freeing = weakref.WeakSet(asyncio.all_tasks() - before - {releasing})
        assert len(freeing) == 1
        answer = await releasing
        await eventually(lambda: gc.collect() >= 0 and not freeing)
        assert await table.release(lease.handoff_id) == answer
