"""Guided answers of the simulated engine: of their grammar, and the same ones wherever they go on."""

import re
from dataclasses import replace

import pytest
from support.engines.guided import by_regex, by_schema, cuts
from support.engines.schemas import Schema

from baton.errors import InvalidRequest, Unsupported
from grammars.guide import Guide, GuideKind
from services.engines.answer import Finished, FinishReason, Tokens
from services.engines.guidance.compiler import GrammarCompiler
from services.engines.guidance.vocabulary import open_vocabulary
from services.engines.prompt import Prompt, Sampling
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.engine import SimulatedEngine
from services.engines.simulated.tokens import byte_vocabulary

PROMPT = Prompt(tuple(b"Tell me about Mia."))
SAMPLED = Sampling(max_tokens=200, seed=5, ignore_eos=True, min_tokens=190)
SCHEMA: Schema = {
    "type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"], "additionalProperties": False,
}  # fmt: skip


def _engine() -> SimulatedEngine:
    return SimulatedEngine(SimulatedConfig(guided_decoding=True))


async def _answer(engine: SimulatedEngine, prompt: Prompt, sampling: Sampling) -> tuple[tuple[int, ...], FinishReason]:
    ids: tuple[int, ...] = ()
    async for event in engine.decode(prompt, sampling):
        match event:
            case Tokens():
                ids += event.ids
            case Finished():
                return ids, event.reason
    raise AssertionError("the stream has no end")


@pytest.mark.parametrize(
    ("guide", "expression"),
    [
        (by_regex("[a-c]{3,50}x"), "[a-c]{3,50}x"),
        (Guide(GuideKind.CHOICE, choices=("yes", "no, never", "perhaps")), "yes|no, never|perhaps"),
        (by_schema(SCHEMA), r'\{\s*"done"\s*:\s*(true|false)\s*\}'),
    ],
    ids=["regex", "choice", "schema"],
)
async def test_an_answer_ends_where_its_grammar_does_and_goes_on_from_any_place(guide: Guide, expression: str) -> None:
    async with _engine() as engine:
        for seed in range(8):
            sampling = replace(SAMPLED, guide=guide, seed=seed)
            ids, reason = await _answer(engine, PROMPT, sampling)
            assert re.fullmatch(expression, bytes(ids[:-1]).decode())
            assert (ids[-1], reason) == (256, FinishReason.END_OF_SEQUENCE)
            for cut in cuts(len(ids)):
                assert (await _answer(engine, replace(PROMPT, emitted=ids[:cut]), sampling))[0] == ids[cut:]


async def test_what_is_banned_comes_only_where_the_grammar_allows_nothing_else() -> None:
    sampling = replace(SAMPLED, guide=by_regex("[ab]{40}c"), bad_sequences=((ord("b"),), (ord("c"),)))
    async with _engine() as engine:
        ids, _ = await _answer(engine, PROMPT, sampling)
    assert bytes(ids[:-1]) == b"a" * 40 + b"c"


async def test_emitted_ids_that_the_grammar_does_not_allow_are_refused() -> None:
    sampling = replace(SAMPLED, guide=by_schema(SCHEMA))
    async with _engine() as engine:
        with pytest.raises(InvalidRequest, match=r"emitted\[1\]"):
            await _answer(engine, replace(PROMPT, emitted=tuple(b"{x")), sampling)
        assert engine.load().blocks_used == 0


async def test_a_token_that_is_not_allowed_ends_the_request_by_an_error() -> None:
    vocabulary = open_vocabulary(byte_vocabulary().files, 257, (256,))
    assert vocabulary is not None
    compiler = GrammarCompiler(vocabulary)
    guidance = await compiler.guidance(by_regex("[ab]*"), tuple(b"ab"))
    compiler.close()
    assert guidance.allowed_ids() == [*b"ab", 256]
    guidance.append(ord("c"))
    with pytest.raises(InvalidRequest, match="cannot be followed"):
        guidance.allowed_ids()


async def test_without_the_option_it_has_no_guided_decoding() -> None:
    async with SimulatedEngine(SimulatedConfig()) as engine:
        assert not engine.facts.guided_decoding
        with pytest.raises(Unsupported):
            await _answer(engine, PROMPT, replace(SAMPLED, guide=by_regex("a")))
