"""The lease table by itself, over the simulated engine's KV."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.lifetimes import in_one_task
from support.worker_calls import until

from services import leases
from services.engines.simulated import SimulatedEngine
from services.engines.simulated_config import SimulatedConfig
from services.leases import Lease, LeaseTable
from services.prompt import Prompt, Sampling


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    async with in_one_task(SimulatedEngine(SimulatedConfig(num_blocks=64, block_bytes=64))) as opened:
        yield opened
        assert opened.load().blocks_used == 0


async def hold(engine: SimulatedEngine, table: LeaseTable, request_id: str = "r") -> Lease:
    return table.hold(request_id, await engine.prefill(Prompt(tuple(range(40))), Sampling(max_tokens=5, seed=1)))


async def test_closing_the_table_frees_what_is_held(engine: SimulatedEngine) -> None:
    async with LeaseTable(10) as table:
        await hold(engine, table)
    assert engine.load().blocks_used == 0


async def test_leases_expire_in_the_order_of_their_last_renewal(engine: SimulatedEngine) -> None:
    async with LeaseTable(0.2) as table:
        first, second = await hold(engine, table, "first"), await hold(engine, table, "second")
        await asyncio.sleep(0.1)
        table.renew(first.handoff_id)
        await until(lambda: len(table.held) == 1)
        assert table.held == (first,)
        assert not (await table.release(second.handoff_id)).still_valid


async def test_a_lease_that_is_over_is_not_renewed_even_if_its_blocks_are_not_freed_yet(
    engine: SimulatedEngine,
) -> None:
    async with LeaseTable(10) as table:
        lease = await hold(engine, table)
        lease.expires_at = 0.0
        assert table.renew(lease.handoff_id) == 0.0


async def test_a_lease_that_is_over_is_not_confirmed_even_if_its_blocks_are_not_freed_yet(
    engine: SimulatedEngine,
) -> None:
    async with LeaseTable(10) as table:
        lease = await hold(engine, table)
        lease.expires_at = 0.0
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
        await until(lambda: engine.load().blocks_used == 0, 1)


async def test_released_ids_are_not_remembered_for_ever(engine: SimulatedEngine) -> None:
    async with LeaseTable(10) as table:
        first = await hold(engine, table)
        await table.release(first.handoff_id)
        for _ in range(leases._REMEMBERED):
            await table.release((await hold(engine, table)).handoff_id)
        assert not (await table.release(first.handoff_id)).still_valid
