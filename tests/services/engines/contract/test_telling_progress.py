"""The contract of engines whose first blocks can be read while a prompt is computed."""

from collections.abc import Sequence

import pytest
from support.engines.engine_calls import BLOCK_TOKENS, greedy

from services.engines.base import Engine
from services.engines.prompt import Prompt

pytestmark = pytest.mark.usefixtures("pool")

STEP_TOKENS = 64
PROMPT = Prompt(tuple(10 + index % 180 for index in range(2 * STEP_TOKENS + 20)))


class Recorder:
    """An engine's reports, with the content that the blocks have at that moment."""

    def __init__(self, engine: Engine) -> None:
        self.block_ids: list[int] = []
        self.content: list[bytes] = []
        self.losses = 0
        self._engine = engine

    def computed(self, block_ids: Sequence[int]) -> None:
        self.block_ids += block_ids
        self.content += [content_of(self._engine, block_id) for block_id in block_ids]

    def lost(self) -> None:
        self.losses += 1


def content_of(engine: Engine, block_id: int) -> bytes:
    assert engine.memory is not None
    return b"".join(engine.memory.read([block_id]))


async def test_blocks_that_are_told_of_are_the_first_ones_and_have_their_final_content(engine: Engine) -> None:
    assert engine.progress is not None
    told = Recorder(engine)
    held = await engine.progress.prefill_reporting(PROMPT, greedy(9), told)
    assert len(told.block_ids) == 2 * STEP_TOKENS // BLOCK_TOKENS
    assert tuple(told.block_ids) == held.block_ids[: len(told.block_ids)]
    assert told.content == [content_of(engine, block_id) for block_id in told.block_ids]
    assert len(set(told.content)) == len(told.content)
    assert told.losses == 0
    await held.release()


async def test_a_prompt_of_one_step_tells_nothing(engine: Engine) -> None:
    assert engine.progress is not None
    told = Recorder(engine)
    held = await engine.progress.prefill_reporting(Prompt(PROMPT.token_ids[:STEP_TOKENS]), greedy(9), told)
    assert told.block_ids == []
    await held.release()


async def test_a_prompt_that_tells_gives_the_token_of_one_that_does_not(engine: Engine) -> None:
    assert engine.progress is not None
    silent = await engine.prefill(Prompt(PROMPT.token_ids, cache_salt="silent"), greedy(9))
    held = await engine.progress.prefill_reporting(PROMPT, greedy(9), Recorder(engine))
    assert held.first_token == silent.first_token
    await silent.release()
    await held.release()
