"""The engine publishes the prefixes in its cache."""

from contextlib import aclosing

from support.engines.embedded import Checkpoint
from support.engines.engine_calls import greedy

from services.engines.kv_events import KvChanged, KvSnapshot
from services.engines.prompt import Prompt
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.kv_cache.blocks import HashChain


async def test_a_step_s_blocks_are_published_together(llama: Checkpoint) -> None:
    prompt = tuple(range(20, 70))
    links = tuple(HashChain("", 16).upto(prompt, 48))
    async with PyTorchEngine(llama.config()) as engine, aclosing(engine.kv_changes()) as changes:
        assert await anext(changes) == KvSnapshot(0, ())
        await (await engine.prefill(Prompt(prompt), greedy(2))).release()
        assert await anext(changes) == KvChanged(0, links, ())
