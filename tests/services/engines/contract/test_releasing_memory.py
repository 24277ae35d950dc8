"""Engines that give their memory back while others need it: only idle ones, and nothing that was there comes back."""

import asyncio
import os
from contextlib import aclosing

import pytest
from support.engines.engine_calls import Generated, collect, greedy
from support.eventually import eventually

from services.engines.base import Engine, ReleasesMemory
from services.engines.prompt import Prompt

pytestmark = pytest.mark.usefixtures("pool")

PROMPT = Prompt(tuple(range(10, 60)))


def releasing(engine: Engine) -> ReleasesMemory:
    found = engine.releases_memory
    if found is None:
        pytest.skip("this engine does not release memory here")
    return found


async def _answer(engine: Engine) -> Generated:
    return await collect(engine.decode(PROMPT, greedy(8)))


async def test_an_engine_that_has_slept_answers_as_before_from_an_empty_cache(engine: Engine) -> None:
    memory = releasing(engine)
    first, second = await _answer(engine), await _answer(engine)
    assert second.finished.cached_tokens == 48
    for _ in range(3):
        assert await memory.release_memory()
        await memory.resume_memory()
        again = await _answer(engine)
        assert again.ids == first.ids
        assert again.finished.cached_tokens == 0


async def test_a_pool_that_was_released_takes_no_memory(engine: Engine) -> None:
    memory = releasing(engine)
    await _answer(engine)
    assert engine.memory is not None
    descriptor = engine.memory.file_descriptor
    assert descriptor is not None
    assert os.fstat(descriptor).st_blocks > 0
    assert await memory.release_memory()
    assert os.fstat(descriptor).st_blocks == 0
    await memory.resume_memory()


async def test_an_engine_with_a_request_keeps_its_memory(engine: Engine) -> None:
    memory = releasing(engine)
    alone = await _answer(engine)
    async with aclosing(engine.decode(PROMPT, greedy(150))) as events:
        await anext(events)
        assert not await memory.release_memory()
    await eventually(lambda: engine.load().blocks_used == 0)
    assert (await _answer(engine)).ids == alone.ids


async def test_an_engine_that_holds_kv_keeps_its_memory(engine: Engine) -> None:
    memory = releasing(engine)
    held = await engine.prefill(PROMPT, greedy(2))
    assert not await memory.release_memory()
    await held.release()
    assert await memory.release_memory()
    await memory.resume_memory()


async def test_requests_that_wait_keep_its_memory(engine: Engine) -> None:
    memory = releasing(engine)
    answers = [asyncio.create_task(_answer(engine)) for _ in range(10)]
    await eventually(lambda: engine.load().running > 0)
    assert not await memory.release_memory()
    found = await asyncio.gather(*answers)
    assert len({each.ids for each in found}) == 1
