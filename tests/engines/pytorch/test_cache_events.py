"""A listener of the engine hears which prefixes it has."""

from support.embedded import Checkpoint
from support.engine_calls import greedy

from services.engines.pytorch.blocks import BlockRemoved, BlockStored
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.prefix import HashChain
from services.prompt import Prompt


async def test_the_full_blocks_of_a_prompt_are_announced_in_order(llama: Checkpoint) -> None:
    heard: list[BlockStored | BlockRemoved] = []
    prompt = tuple(range(20, 70))
    async with PyTorchEngine(llama.config(), heard.append) as engine:
        heard.clear()  # what the warm-up left, and took away
        await (await engine.prefill(Prompt(prompt), greedy(2))).release()
    assert heard == [BlockStored(link) for link in HashChain("", 16).upto(prompt, 48)]
