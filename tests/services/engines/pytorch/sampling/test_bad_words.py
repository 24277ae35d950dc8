"""Bad words never come, their beginnings do, and what is banned depends on the answer alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import blocks_used, collect, disaggregated, greedy
from support.engines.guided import TOKENIZER, answer, by_regex

from baton.errors import InvalidRequest
from services.engines.bad_words import BadWords
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.sampling.sampling import SamplerState

SAMPLED = Sampling(max_tokens=30, temperature=1.0, seed=11, ignore_eos=True)
LOOKUP = {"kind": "prompt_lookup", "max_tokens": 4, "ngram": 1, "max_sequences": 64}
WAYS = {"greedy": greedy(30), "sampled": SAMPLED, "top_k": replace(SAMPLED, top_k=20, top_p=0.9)}
# Few ids, so that sequences overlap, repeat and end with each other.
ids = st.integers(0, 2)
sequences = st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), min_size=1, max_size=6)


def has(answer: Sequence[int], sequence: Sequence[int]) -> bool:
    """True if the answer has the ids one after the other."""
    size = len(sequence)
    return any(tuple(answer[start : start + size]) == tuple(sequence) for start in range(len(answer) - size + 1))


def ends(answer: Sequence[int], sequence: Sequence[int]) -> bool:
    return len(answer) >= len(sequence) and tuple(answer[len(answer) - len(sequence) :]) == tuple(sequence)


@given(sequences, st.lists(ids, max_size=12), st.integers(0, 12))
def test_a_token_is_banned_exactly_if_a_sequence_would_end_with_it(
    sequences: list[tuple[int, ...]], answer: list[int], cut: int
) -> None:
    expected = {token for token in range(3) if any(ends([*answer, token], one) for one in sequences)}
    assert BadWords(sequences, answer).banned() == expected
    assert BadWords(sequences, answer[:cut]).after(answer[cut:]).banned() == expected
    one_by_one = BadWords(sequences, ())
    for token in answer:
        one_by_one = one_by_one.after((token,))
    assert one_by_one.banned() == expected


async def ids_of(engine: PyTorchEngine, prompt: Prompt, sampling: Sampling) -> tuple[int, ...]:
    return (await collect(engine.decode(prompt, sampling))).ids


def bad_for(answer: tuple[int, ...], sampling: Sampling) -> Sampling:
    """The same sampling without the answer's first token, and without pairs and triples of its tokens."""
    pairs = tuple(answer[start : start + 2] for start in range(1, 20, 2) if answer[0] not in answer[start : start + 2])
    return replace(sampling, bad_sequences=((answer[0],), *pairs, answer[5:8]))


@pytest.fixture(params=["library", "fused"])
def model(llama: Checkpoint, request: pytest.FixtureRequest) -> Checkpoint:
    return replace(llama, execution=request.param)


async def test_a_bad_word_never_comes_and_its_beginning_may(model: Checkpoint) -> None:
    prompt = Prompt(tuple(range(20, 40)))
    async with model.engine() as engine:
        for way, sampling in WAYS.items():
            free = await ids_of(engine, prompt, sampling)
            pair = next(free[start : start + 2] for start in range(3, 20) if free[start] != free[start + 1])
            held = await ids_of(engine, prompt, replace(sampling, bad_sequences=(pair,)))
            place = next(start for start in range(30) if free[start : start + 2] == pair)
            assert held[: place + 1] == free[: place + 1], way
            assert held[place] == pair[0], way
            assert not has(held, pair), way


async def test_the_first_token_is_never_a_bad_word_of_one(model: Checkpoint) -> None:
    prompt = Prompt(tuple(range(20, 40)))
    async with model.engine() as engine:
        free = await ids_of(engine, prompt, greedy(30))
        bad = replace(greedy(30), bad_sequences=((free[0],),))
        held = await engine.prefill(prompt, bad)
        await held.release()
        assert held.first_token != free[0]
        assert free[0] not in await ids_of(engine, prompt, bad)
        # The prompt's own tokens do not count as the beginning of a word.
        beginning = replace(greedy(30), bad_sequences=((39, free[0]),))
        assert (await ids_of(engine, prompt, beginning))[0] == free[0]


async def test_an_answer_continues_exactly_after_a_handoff_and_a_lost_worker(model: Checkpoint) -> None:
    prompt = Prompt(tuple(range(20, 40)))
    async with model.engine() as one, model.engine() as other:
        for way, sampling in WAYS.items():
            bad = bad_for(await ids_of(one, prompt, sampling), sampling)
            whole = await ids_of(one, prompt, bad)
            assert not any(has(whole, sequence) for sequence in bad.bad_sequences), way
            assert await disaggregated(one, other, prompt, bad) == whole[1:], way
            for cut in (1, 2, 7, 20):
                rest = await ids_of(other, replace(prompt, emitted=whole[:cut]), bad)
                assert rest == whole[cut:], (way, cut)
        assert blocks_used(one) == blocks_used(other) == 0


async def test_speculation_gives_the_same_ids(demo: Checkpoint) -> None:
    prompt = Prompt(tuple(TOKENIZER.encode("Repeat: " + "kite drum lamp " * 6).ids))
    drafted = accepted = 0
    async with demo.engine() as plain, demo.engine(speculation=LOOKUP) as speculating:
        for way in (greedy(30), replace(SAMPLED, temperature=0.5)):
            free = await ids_of(plain, prompt, way)
            for start in (3, 8):
                bad = replace(way, bad_sequences=(free[start : start + 2],))
                found = await collect(speculating.decode(prompt, bad))
                assert found.ids == await ids_of(plain, prompt, bad), start
                drafted += found.finished.drafted_tokens
                accepted += found.finished.accepted_tokens
    assert drafted > accepted > 0


def test_after_a_draft_a_word_that_begins_with_it_is_banned() -> None:
    sampling = replace(greedy(9), bad_sequences=((5,), (6, 7), (8, 6, 9)))
    state = SamplerState(Prompt((1, 6), emitted=(8,)), sampling, frozenset())
    assert state.banned == {5}
    assert [state.ahead(drafts).banned for drafts in ((6,), (6, 9), (4, 6))] == [{5, 7, 9}, {5}, {5, 7}]
    assert state.banned == {5}
    state.append(6)
    assert state.banned == {5, 7, 9}


async def test_others_in_the_batch_get_what_they_get_alone(model: Checkpoint) -> None:
    prompt = Prompt(tuple(range(20, 40)))
    async with model.engine() as engine:
        free = await ids_of(engine, prompt, SAMPLED)
        ways = [SAMPLED, bad_for(free, SAMPLED), greedy(30), bad_for(free, greedy(30))]
        alone = [await ids_of(engine, prompt, way) for way in ways]
        assert await asyncio.gather(*(ids_of(engine, prompt, way) for way in ways)) == alone


async def test_bad_words_hold_inside_a_grammar_unless_it_allows_nothing_else(demo: Checkpoint) -> None:
    one, other = (TOKENIZER.token_to_id(letter) for letter in "ab")
    guide = by_regex("[ab]{12}")
    way = replace(SAMPLED, bad_sequences=((one, one), (one, other, one)))
    async with demo.engine(canary_seconds=None) as engine:
        found = (await answer(engine, guide, way)).ids
        assert not any(has(found, sequence) for sequence in way.bad_sequences)
        letters = tuple((token,) for token in range(768) if set(TOKENIZER.decode([token])) <= set("ab"))
        text = (await answer(engine, guide, replace(SAMPLED, bad_sequences=letters))).text
        assert set(text) <= set("ab")
        assert len(text) == 12


async def test_sequences_that_could_ban_every_token_are_refused(llama: Checkpoint) -> None:
    async with llama.engine() as engine:
        size = engine.facts.vocab_size
        for wrong in (((5, size),), tuple((token,) for token in range(size))):
            with pytest.raises(InvalidRequest, match=r"sampling\.bad_sequences"):
                await collect(engine.decode(Prompt((5, 6)), replace(greedy(3), bad_sequences=wrong)))
