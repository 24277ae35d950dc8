"""The memory that long answers leave in a worker: its pool and its prefix cache fill up, and then nothing grows."""

import gc
import sys
from contextlib import aclosing

from services.engines.prompt import Prompt, Sampling
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.engine import SimulatedEngine

ANSWERS, TOKENS, BLOCKS = 20, 500, 64


async def test_once_each_block_was_used_long_answers_leave_nothing() -> None:
    async with SimulatedEngine(SimulatedConfig(name="demo", num_blocks=BLOCKS, max_context_tokens=600)) as engine:
        first = 0

        async def answer(count: int) -> int:
            """Answers so many prompts; how many blocks of memory live then."""
            nonlocal first
            for _ in range(count):
                first += 1
                async with aclosing(engine.decode(Prompt((first, 7, 7)), Sampling(max_tokens=TOKENS))) as events:
                    assert [event async for event in events]
            gc.collect()
            return sys.getallocatedblocks()

        before = await answer(2 * BLOCKS * 16 // TOKENS)
        assert await answer(ANSWERS) - before < ANSWERS * TOKENS / 50
