"""Blocks in host memory are lent to other workers by copies in the pool, of which nothing is left."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import collect, greedy
from support.engines.tier_damage import BLOCK_BYTES, settle
from support.eventually import eventually

from engine_protocol.prefix_hash import block_hashes
from services.engines.kv_events import KvTier
from services.engines.prompt import Prompt, Session
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.kv_cache.tiers.host import Copier

POOL = 40
SETTINGS = {"kv_cache_bytes": POOL * BLOCK_BYTES, "tiers": {"host_bytes": 200 * BLOCK_BYTES}}
Ids = Callable[[int, int], tuple[int, ...]]


def evict(core: EngineCore) -> None:
    core._pool.release(core._pool.allocate(core._pool.available))
    settle(core)


async def in_host_memory(engine: PyTorchEngine, prompt: tuple[int, ...]) -> list[bytes]:
    """Lets the full blocks of a prompt leave the pool; returns their names."""
    await collect(engine.decode(Prompt(prompt), greedy(4)))
    await engine._loop.call(evict)
    names = block_hashes(prompt, 16)
    assert await engine._loop.call(lambda core: core._pool.match(names)) == []
    return names


async def test_blocks_in_host_memory_are_lent_with_what_they_contained(llama: Checkpoint, random_ids: Ids) -> None:
    prompt = random_ids(200, 1)
    async with llama.engine(**SETTINGS) as engine:
        await collect(engine.decode(Prompt(prompt), greedy(4)))
        names = block_hashes(prompt, 16)
        before = engine.digest(await engine._loop.call(lambda core: core._pool.match(names)))
        await engine._loop.call(evict)
        lent = await engine.lend_prefix(names, 0)
        assert lent is not None
        assert len(lent.block_ids) == 12
        assert engine.digest(lent.block_ids) == before
        assert await lent.release() == 12
        await eventually(lambda: engine.load().blocks_used == 0)
        memory = engine.load().memory
        assert memory is not None
        assert memory.host_used == 12


async def test_the_rest_is_lent_if_the_pool_still_has_the_beginning(llama: Checkpoint, random_ids: Ids) -> None:
    prompt = random_ids(200, 1)
    async with llama.engine(**SETTINGS) as engine:
        names = await in_host_memory(engine, prompt)
        await collect(engine.decode(Prompt(prompt[:100]), greedy(1)))
        lent = await engine.lend_prefix(names, 0)
        assert lent is not None
        assert len(lent.block_ids) == 12
        await lent.release()


@pytest.mark.parametrize("session", [Session(b"s"), None], ids=["of a session", "of no session"])
async def test_what_was_lent_of_a_session_is_the_first_to_be_evicted(
    llama: Checkpoint, random_ids: Ids, session: Session | None
) -> None:
    lent_prompt, other = random_ids(100, 1), random_ids(100, 2)
    async with llama.engine(**SETTINGS) as engine:
        await collect(engine.decode(Prompt(lent_prompt, session=session), greedy(1)))
        await collect(engine.decode(Prompt(other), greedy(1)))
        names = block_hashes(lent_prompt, 16)
        lent = await engine.lend_prefix(names, 0)
        assert lent is not None
        assert await lent.release() == len(names)
        has_dead = await engine._loop.call(lambda core: core._pool._idle.has_dead)
        assert has_dead == (session is not None)


async def test_what_cannot_be_loaded_is_not_lent(
    llama: Checkpoint, random_ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the link is broken")

    async with llama.engine(**SETTINGS) as engine:
        names = await in_host_memory(engine, random_ids(200, 1))
        monkeypatch.setattr(Copier, "copy_in", fails)
        assert await engine.lend_prefix(names, 0) is None
        await eventually(lambda: engine.load().blocks_used == 0)
        assert await engine._loop.call(lambda core: core.tiers is not None and core.tiers.directory.used(KvTier.HOST))


async def test_without_room_in_the_pool_nothing_is_loaded(llama: Checkpoint, random_ids: Ids) -> None:
    async with llama.engine(**SETTINGS) as engine:
        names = await in_host_memory(engine, random_ids(200, 1))
        taken = await engine._loop.call(lambda core: core._pool.allocate(core._pool.available))
        assert await engine.lend_prefix(names, 0) is None
        await engine._loop.call(lambda core: core._pool.release(taken))


@pytest.mark.parametrize("ends", ["cancelled", "closed"])
async def test_a_loan_that_ends_amid_its_load_leaves_no_block(
    llama: Checkpoint, random_ids: Ids, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    copy_in = Copier.copy_in

    def waits(self: Copier, rows: object, blocks: object) -> None:
        begun.set()
        go_on.wait(60)
        copy_in(self, rows, blocks)  # type: ignore[arg-type]

    async with llama.engine(**SETTINGS) as engine:
        names = await in_host_memory(engine, random_ids(200, 1))
        monkeypatch.setattr(Copier, "copy_in", waits)
        lending = asyncio.create_task(engine.lend_prefix(names, 0))
        assert await asyncio.to_thread(begun.wait, 60)
        if ends == "cancelled":
            lending.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await lending
            await eventually(lambda: engine.load().blocks_used == 0)
            lent = await engine.lend_prefix(names, 0)
            assert lent is not None
            await lent.release()
        else:
            threading.Timer(0.2, go_on.set).start()
    if ends == "closed":
        assert await lending is None


async def test_what_leaves_host_memory_for_the_loan_itself_is_not_lent(llama: Checkpoint, random_ids: Ids) -> None:
    def fill(core: EngineCore) -> list[int]:
        return core._pool.allocate(len(core._pool._empty) + len(core._pool._emptied))

    async with llama.engine(**SETTINGS | {"tiers": {"host_bytes": BLOCK_BYTES}}) as engine:
        names = await in_host_memory(engine, random_ids(17, 1))
        await collect(engine.decode(Prompt(random_ids(200, 2)), greedy(1)))
        # Without an empty block, the one to copy into is evicted: to the only slot in host memory.
        taken = await engine._loop.call(fill)
        assert await engine.lend_prefix(names, 0) is None
        await engine._loop.call(lambda core: core._pool.release(taken))
        await eventually(lambda: engine.load().blocks_used == 0)
        assert engine.healthy
