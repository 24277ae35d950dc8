"""Sampling options, on every engine that says that it has them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.engines.engine_calls import collect, disaggregated, greedy

from baton.errors import InvalidRequest
from services.engines.base import Engine
from services.engines.prompt import Prompt, Sampling

PROMPT = Prompt(tuple(range(10, 60)))
WAYS = {
    "greedy": greedy(24),
    "sampled": Sampling(max_tokens=24, temperature=0.8, seed=7, ignore_eos=True),
}


def needs(engine: Engine, option: str) -> None:
    """Skips the test if the engine says that it lacks this option."""
    if option in engine.facts.unsupported_sampling:
        pytest.skip(f"the {engine.facts.engine} engine says that it does not have {option}")


@pytest.fixture
def choosing(request: pytest.FixtureRequest) -> None:
    """For tests of engines that choose tokens themselves, and not by a stand-in for their package."""
    name = request.getfixturevalue("kind").name
    if name.startswith("trtllm-") and name != "trtllm-real":
        pytest.skip("the stand-in has no logits: tests/services/engines/trtllm has what it is asked for")


def has(answer: Sequence[int], sequence: Sequence[int]) -> bool:
    """True if the answer has the ids one after the other."""
    size = len(sequence)
    return any(tuple(answer[start : start + size]) == tuple(sequence) for start in range(len(answer) - size + 1))


async def ids(engine: Engine, sampling: Sampling, prompt: Prompt = PROMPT) -> tuple[int, ...]:
    return (await collect(engine.decode(prompt, sampling))).ids


@pytest.mark.parametrize("way", WAYS)
async def test_bad_words_never_come_here_and_after_a_handoff(engine: Engine, decoder: Engine, way: str) -> None:
    needs(engine, "bad_words")
    free = await ids(engine, WAYS[way])
    first, pair, triple = free[0], free[3:5], free[8:11]
    bad = replace(WAYS[way], bad_sequences=((first,), pair, triple))
    held = await ids(engine, bad)
    assert first not in held
    assert not has(held, pair)
    assert not has(held, triple)
    assert await disaggregated(engine, decoder, PROMPT, bad) == held[1:]
    assert await ids(engine, bad, replace(PROMPT, emitted=held[:9])) == held[9:]


async def test_the_beginning_of_a_bad_word_comes_as_before(engine: Engine) -> None:
    needs(engine, "bad_words")
    free = await ids(engine, WAYS["sampled"])
    pair = next(free[start : start + 2] for start in range(3, 20) if free[start] != free[start + 1])
    place = next(start for start in range(24) if free[start : start + 2] == pair)
    held = await ids(engine, replace(WAYS["sampled"], bad_sequences=(pair,)))
    assert held[: place + 1] == free[: place + 1]
    assert held[place + 1] != pair[1]


async def test_bad_words_that_could_ban_every_token_are_refused(engine: Engine) -> None:
    needs(engine, "bad_words")
    every = tuple((token,) for token in range(engine.facts.vocab_size))
    with pytest.raises(InvalidRequest, match=r"sampling\.bad_sequences"):
        await ids(engine, replace(greedy(3), bad_sequences=every))
    with pytest.raises(InvalidRequest, match=r"sampling\.bad_sequences"):
        await engine.prefill(PROMPT, replace(greedy(3), bad_sequences=every))


@pytest.mark.parametrize("way", WAYS)
async def test_a_bias_bans_and_forces_tokens(engine: Engine, decoder: Engine, way: str) -> None:
    needs(engine, "logit_bias")
    free = await ids(engine, WAYS[way])
    banned = replace(WAYS[way], logit_bias=dict.fromkeys(free[:4], -100.0))
    held = await ids(engine, banned)
    assert not set(held) & set(free[:4])
    assert await disaggregated(engine, decoder, PROMPT, banned) == held[1:]
    assert set(await ids(engine, replace(WAYS[way], logit_bias={free[2]: 100.0}))) == {free[2]}
    assert set(await ids(engine, replace(WAYS[way], logit_bias={70: 100.0}))) == {70}


@pytest.mark.usefixtures("choosing")
@pytest.mark.parametrize("way", WAYS)
async def test_penalties_make_tokens_come_less_often(engine: Engine, decoder: Engine, way: str) -> None:
    needs(engine, "presence_penalty")
    needs(engine, "frequency_penalty")
    likely = replace(WAYS[way], logit_bias=dict.fromkeys(range(97, 107), 50.0))
    repeated = await ids(engine, likely)
    penalised = replace(likely, presence_penalty=2.0, frequency_penalty=2.0)
    spread = await ids(engine, penalised)
    assert len(set(repeated)) < len(set(spread))
    assert await disaggregated(engine, decoder, PROMPT, penalised) == spread[1:]
    assert await ids(engine, penalised, replace(PROMPT, emitted=spread[:9])) == spread[9:]


@pytest.mark.usefixtures("choosing")
async def test_a_stop_token_does_not_come_before_min_tokens(engine: Engine) -> None:
    needs(engine, "min_tokens")
    free = await ids(engine, greedy(24))
    stopped = await ids(engine, replace(greedy(24), min_tokens=12, stop_token_ids=frozenset(free[:2])))
    assert len(stopped) >= 12
    assert not set(stopped[:11]) & set(free[:2])
