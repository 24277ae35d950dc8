"""Greedy ids equal those of transformers' `generate`, however the work is split into steps, blocks and workers."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from support.clients.scraping import since
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import blocks_used, collect, disaggregated, greedy

from services.engines.prompt import Prompt
from services.engines.pytorch.engine import PyTorchEngine

LENGTHS = [1, 2, 15, 16, 17, 33, 257, 600]
MAX_TOKENS = 16
Ids = Callable[[int, int], tuple[int, ...]]
# generate() stops at the end of sequence, and so do these requests.
GREEDY = replace(greedy(MAX_TOKENS), ignore_eos=False)


@pytest.fixture
def prompts(random_ids: Ids) -> list[tuple[int, ...]]:
    return [random_ids(length, length) for length in LENGTHS]


def expected(checkpoint: Checkpoint, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [checkpoint.generate(prompt, MAX_TOKENS) for prompt in prompts]


async def together(engine: PyTorchEngine, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    generated = await asyncio.gather(*(collect(engine.decode(Prompt(prompt), GREEDY)) for prompt in prompts))
    return [one.ids for one in generated]


async def test_alone(checkpoint: Checkpoint, prompts: list[tuple[int, ...]]) -> None:
    async with checkpoint.engine() as engine:
        alone = [(await collect(engine.decode(Prompt(prompt), GREEDY))).ids for prompt in prompts]
    assert alone == expected(checkpoint, prompts)


async def test_32_at_a_time(checkpoint: Checkpoint, random_ids: Ids) -> None:
    prompts = [random_ids(length, seed) for seed, length in enumerate([1, 7, 16, 64] * 8)]
    async with checkpoint.engine() as engine:
        assert await together(engine, prompts) == expected(checkpoint, prompts)


async def test_with_prefixes_from_the_cache(checkpoint: Checkpoint, prompts: list[tuple[int, ...]]) -> None:
    async with checkpoint.engine() as engine:
        await together(engine, prompts)
        again = await asyncio.gather(*(collect(engine.decode(Prompt(prompt), GREEDY)) for prompt in prompts))
    assert [one.ids for one in again] == expected(checkpoint, prompts)
    assert [one.finished.cached_tokens for one in again] == [(length - 1) // 16 * 16 for length in LENGTHS]


async def test_with_prompts_cut_into_small_chunks(checkpoint: Checkpoint, prompts: list[tuple[int, ...]]) -> None:
    async with checkpoint.engine(max_sequences=9, max_step_tokens=23) as engine:
        assert await together(engine, prompts) == expected(checkpoint, prompts)


@pytest.mark.parametrize("block_tokens", [1, 5, 32])
async def test_with_blocks_of_other_sizes(llama: Checkpoint, prompts: list[tuple[int, ...]], block_tokens: int) -> None:
    async with llama.engine(block_tokens=block_tokens) as engine:
        assert await together(engine, prompts) == expected(llama, prompts)


async def test_without_a_prefix_cache(llama: Checkpoint, prompts: list[tuple[int, ...]]) -> None:
    async with llama.engine(prefix_cache=False) as engine:
        assert await together(engine, prompts) == expected(llama, prompts)


async def test_with_a_pool_so_small_that_sequences_give_way(llama: Checkpoint, random_ids: Ids) -> None:
    prompts = [random_ids(60, seed) for seed in range(12)]
    whole = [llama.generate(prompt, 60) for prompt in prompts]
    sampling = replace(GREEDY, max_tokens=60)
    preemptions = since("baton_preemptions_total")
    async with llama.engine(kv_cache_bytes=25 * _block_bytes(llama), max_context_tokens=200) as engine:
        generated = await asyncio.gather(*(collect(engine.decode(Prompt(prompt), sampling)) for prompt in prompts))
        assert preemptions.grown > 0
        assert blocks_used(engine) == 0
    assert [one.ids for one in generated] == whole


def _block_bytes(checkpoint: Checkpoint) -> int:
    config = checkpoint.plain._model.config
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * 16 * config.head_dim * 4)


async def test_prefilled_on_one_engine_and_decoded_on_another(
    checkpoint: Checkpoint, prompts: list[tuple[int, ...]]
) -> None:
    async with checkpoint.engine() as prefill, checkpoint.engine() as decode:
        rest = await asyncio.gather(*(disaggregated(prefill, decode, Prompt(p), GREEDY) for p in prompts))
        assert blocks_used(prefill) == blocks_used(decode) == 0
    assert rest == [ids[1:] for ids in expected(checkpoint, prompts)]


async def test_prefilled_elsewhere_with_several_tokens_sent_since(llama: Checkpoint, random_ids: Ids) -> None:
    prompt = random_ids(70, 1)
    whole = llama.generate(prompt, MAX_TOKENS)
    async with llama.engine() as prefill, llama.engine() as decode:
        rest = await disaggregated(prefill, decode, Prompt(prompt), GREEDY, more=whole[1:8])
    assert rest == whole[8:]


async def test_decoded_where_a_pulled_sequence_gives_way_and_is_computed_again(
    llama: Checkpoint, random_ids: Ids
) -> None:
    prompts = [random_ids(60, seed) for seed in range(6)]
    whole = [llama.generate(prompt, 60) for prompt in prompts]
    sampling = replace(GREEDY, max_tokens=60)
    tight = {"kv_cache_bytes": 26 * _block_bytes(llama), "max_context_tokens": 200}
    preemptions = since("baton_preemptions_total")
    async with llama.engine() as prefill, llama.engine(**tight) as decode:
        rest = await asyncio.gather(*(disaggregated(prefill, decode, Prompt(p), sampling) for p in prompts))
        assert preemptions.grown > 0
    assert rest == [ids[1:] for ids in whole]
