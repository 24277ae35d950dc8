"""Prompt lookup gives the same ids as decoding one by one: greedy, sampled, with every way that an answer can end."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from support.clients.scraping import since
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import Generated, blocks_used, collect, disaggregated, greedy

from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.speculation.prompt_lookup import DraftState

Ids = Callable[[int, int], tuple[int, ...]]
LOOKUP = {"kind": "prompt_lookup", "max_tokens": 4, "ngram": 1, "max_sequences": 64}
# Sharp enough that repeated text goes on as before, and not always.
SAMPLED = Sampling(max_tokens=40, temperature=0.4, seed=7, ignore_eos=True)
WAYS = {
    "greedy": greedy(40),
    "ends by itself": replace(greedy(40), ignore_eos=False),
    "sampled": SAMPLED,
    "top_k and top_p": replace(SAMPLED, top_k=20, top_p=0.9),
    "min_p and bias": replace(SAMPLED, min_p=0.05, logit_bias={5: 2.0}),
    "bad words": replace(SAMPLED, bad_sequences=tuple((first, second) for first in range(9) for second in range(9))),
    "stop ids": replace(SAMPLED, stop_token_ids=frozenset(range(100, 140))),
    "min_tokens": replace(SAMPLED, min_tokens=20, stop_token_ids=frozenset(range(200))),
    "logprobs": replace(SAMPLED, logprobs=3),
    "penalties": replace(SAMPLED, repetition_penalty=1.2, frequency_penalty=0.3),
}


@pytest.fixture
def prompts(random_ids: Ids) -> list[tuple[int, ...]]:
    """Texts that repeat, and one that does not."""
    return [random_ids(6, 1) * 9, random_ids(23, 2) * 2, random_ids(40, 3), random_ids(1, 4) * 33]


async def answers(engine: PyTorchEngine, prompts: Sequence[tuple[int, ...]], sampling: Sampling) -> list[Generated]:
    return await asyncio.gather(*(collect(engine.decode(Prompt(prompt), sampling)) for prompt in prompts))


def on_progress(generated: Sequence[Generated]) -> list[tuple[object, ...]]:
    return [(one.ids, one.finished.reason, [lp.token_id for lp in one.logprobs]) for one in generated]


async def test_every_way_to_sample_gives_the_same_ids(llama: Checkpoint, prompts: list[tuple[int, ...]]) -> None:
    async with llama.engine() as plain, llama.engine(speculation=LOOKUP) as speculating:
        for way, sampling in WAYS.items():
            found = await answers(speculating, prompts, sampling)
            assert on_progress(found) == on_progress(await answers(plain, prompts, sampling)), way
            drafted = sum(one.finished.drafted_tokens for one in found)
            assert (drafted == 0) == (way == "penalties"), way
            assert blocks_used(speculating) == 0


async def test_accepted_drafts_are_counted(llama: Checkpoint, prompts: list[tuple[int, ...]]) -> None:
    async with llama.engine(speculation=LOOKUP) as engine:
        drafted, accepted = since("baton_drafted_tokens_total"), since("baton_accepted_draft_tokens_total")
        found = await answers(engine, prompts, greedy(64))
    assert sum(one.finished.drafted_tokens for one in found) == drafted.grown
    assert sum(one.finished.accepted_tokens for one in found) == accepted.grown
    assert 0 < accepted.grown <= drafted.grown


async def test_confirmed_blocks_are_cached_with_the_right_content(
    llama: Checkpoint, prompts: list[tuple[int, ...]]
) -> None:
    async with llama.engine(speculation=LOOKUP) as engine:
        first = await answers(engine, prompts, greedy(40))
        longer = [prompt + one.ids for prompt, one in zip(prompts, first, strict=True)]
        again = await answers(engine, longer, greedy(8))
        assert all(one.finished.cached_tokens >= len(before) - 16 for one, before in zip(again, longer, strict=True))
    async with llama.engine(prefix_cache=False) as plain:
        assert on_progress(again) == on_progress(await answers(plain, longer, greedy(8)))


async def test_after_a_handoff_and_with_little_room(llama: Checkpoint, prompts: list[tuple[int, ...]]) -> None:
    async with llama.engine() as plain:
        expected = [one.ids for one in await answers(plain, prompts, SAMPLED)]
    tight = {"kv_cache_bytes": 24 * _block_bytes(llama), "max_context_tokens": 200}
    async with llama.engine() as prefill, llama.engine(speculation=LOOKUP, **tight) as decode:
        rest = await asyncio.gather(*(disaggregated(prefill, decode, Prompt(one), SAMPLED) for one in prompts))
        assert blocks_used(prefill) == blocks_used(decode) == 0
    assert rest == [ids[1:] for ids in expected]


async def test_an_answer_goes_on_from_the_ids_that_the_client_has(
    llama: Checkpoint, prompts: list[tuple[int, ...]]
) -> None:
    async with llama.engine() as plain, llama.engine(speculation=LOOKUP) as speculating:
        for prompt in prompts:
            whole = (await collect(plain.decode(Prompt(prompt), SAMPLED))).ids
            rest = await collect(speculating.decode(Prompt(prompt, emitted=whole[:11]), SAMPLED))
            assert rest.ids == whole[11:]


async def test_an_answer_that_is_left_frees_its_blocks(llama: Checkpoint, random_ids: Ids) -> None:
    async with llama.engine(speculation=LOOKUP) as engine:
        stream = engine.decode(Prompt(random_ids(6, 1) * 9), greedy(500))
        await anext(stream)
        await stream.aclose()
        assert blocks_used(engine) == 0


def test_a_draft_repeats_what_followed_and_a_sequence_whose_drafts_fail_rests() -> None:
    state = DraftState()
    assert state.propose([1, 2, 3, 4, 1, 2], ngram=2, limit=5) == (3, 4, 1, 2, 3)
    assert state.propose([1, 2, 3, 4, 1, 2, 9], ngram=2, limit=5) == ()
    for _ in range(3):
        state.record(0, num_tokens=7)
    assert state.propose([1, 2, 3, 4, 1, 2, 9, 1, 2], ngram=2, limit=5) == ()
    assert state.propose([1, 2, 3, 4, 1, 2, 9, 1, 2, 3, 4, 5, 1, 2, 3], ngram=2, limit=1) == (4,)


def _block_bytes(checkpoint: Checkpoint) -> int:
    config = checkpoint.plain._model.config
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * 16 * config.head_dim * 4)
