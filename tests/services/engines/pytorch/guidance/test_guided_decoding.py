"""Answers of the embedded engine follow their grammar, whatever else the request asks for."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from support.engines.embedded import Checkpoint
from support.engines.guided import GREEDY, PROMPT, SAMPLED, TOKENIZER, answer, by_regex, by_schema, check_json, cuts
from support.engines.schemas import FLAG, Schema, all_schemas, closed, some_schemas
from support.lifetimes import in_one_task

from baton.errors import InvalidRequest
from grammars.guide import Guide, GuideKind, Tag
from services.engines.answer import FinishReason
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.engine import PyTorchEngine

END = FinishReason.END_OF_SEQUENCE


@pytest.fixture(params=["library", "fused"])
async def engine(demo: Checkpoint, request: pytest.FixtureRequest) -> AsyncIterator[PyTorchEngine]:
    """The demo model, computed in both ways."""
    async with in_one_task(replace(demo, execution=request.param).engine(canary_seconds=None)) as running:
        yield running


async def check_schema(engine: PyTorchEngine, schema: Schema, sampling: Sampling, most_cuts: int = 4) -> None:
    """The answer is valid, and continues in the same way from any of its beginnings, as after a lost worker."""
    guide = by_schema(schema)
    whole = await answer(engine, guide, sampling)
    assert whole.reason is END, whole.text
    check_json(whole.text, schema)
    for cut in cuts(len(whole.ids), most_cuts):
        rest = await answer(engine, guide, sampling, replace(PROMPT, emitted=whole.ids[:cut]))
        assert whole.ids == whole.ids[:cut] + rest.ids


async def test_answers_are_valid_and_continue_inside_the_grammar(engine: PyTorchEngine) -> None:
    await asyncio.gather(
        *(check_schema(engine, schema, way, 2) for _, schema in some_schemas() for way in (GREEDY, SAMPLED))
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_all_200_schemas_are_followed(engine: PyTorchEngine) -> None:
    schemas = all_schemas()
    for start in range(0, len(schemas), 25):
        part = schemas[start : start + 25]
        await asyncio.gather(*(check_schema(engine, schema, way) for _, schema in part for way in (GREEDY, SAMPLED)))


@pytest.mark.parametrize(
    ("guide", "expression"),
    [
        (by_regex("[a-c]{3,5}x"), "[a-c]{3,5}x"),
        (Guide(GuideKind.CHOICE, choices=("yes", "no, never", "perhaps")), "yes|no, never|perhaps"),
        (Guide(GuideKind.GRAMMAR, 'start: "a" part{1,3} "."\npart: "x" | "y"'), r"a[xy]{1,3}\."),
        (Guide(GuideKind.GRAMMAR, 'root ::= "a" part part? "."\npart ::= "x" | "y"'), r"a[xy]{1,2}\."),
        (
            Guide(
                GuideKind.STRUCTURAL_TAGS,
                tags=(Tag("<call=on>", '{"type": "boolean"}', "</call>", "<call"),),
                needs_tag=True,
            ),
            r"<call=on>(true|false)</call>",
        ),
    ],
    ids=["regex", "choice", "lark", "gbnf", "tag"],
)
async def test_every_kind_of_grammar_is_followed(engine: PyTorchEngine, guide: Guide, expression: str) -> None:
    for way in (GREEDY, SAMPLED, replace(SAMPLED, temperature=3.0, top_k=3), replace(SAMPLED, top_p=0.3)):
        found = await answer(engine, guide, way)
        assert re.fullmatch(expression, found.text)
        assert found.reason is END


SPELT = ("<image>", "<|user|>", "<|eos|>")


@pytest.mark.parametrize(
    ("guide", "expression"),
    [
        *((Guide(GuideKind.CHOICE, choices=(text,)), re.escape(text)) for text in SPELT),
        (by_regex(r"a?(<image>|<\|eos\|>)b"), r"a?(<image>|<\|eos\|>)b"),
        (by_schema(closed(**{"<|user|>": {"enum": ["<image>"]}})), r'\{\s*"<\|user\|>"\s*:\s*"<image>"\s*\}'),
        (Guide(GuideKind.GRAMMAR, 'start: "<image>" <image> "/<|user|>" // <|user|>'), r"<image>/<\|user\|>"),
    ],
)
async def test_text_that_spells_a_special_token_is_followed_and_continued(
    engine: PyTorchEngine, guide: Guide, expression: str
) -> None:
    for way in (GREEDY, SAMPLED):
        whole = await answer(engine, guide, way)
        assert re.fullmatch(expression, whole.text)
        assert whole.reason is END
        for cut in cuts(len(whole.ids), 3):
            rest = await answer(engine, guide, way, replace(PROMPT, emitted=whole.ids[:cut]))
            assert whole.ids == whole.ids[:cut] + rest.ids


async def test_a_special_token_that_the_model_lacks_is_named(engine: PyTorchEngine) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await answer(engine, Guide(GuideKind.GRAMMAR, "start: <lacking>"))
    assert "<lacking>" in str(refused.value)
    assert "available" not in str(refused.value)


async def test_an_answer_that_its_grammar_cannot_follow_further_says_why(engine: PyTorchEngine) -> None:
    guide = Guide(GuideKind.GRAMMAR, "start: X\nX: /(.*a.{30}.*)/ & /(.*b.{37}.*)/ & /(.*ab.{31}.*c)/")
    start = tuple(TOKENIZER.encode("ab" * 60, add_special_tokens=False).ids)
    with pytest.raises(InvalidRequest, match="too many expressions constructed") as refused:
        await answer(engine, guide, GREEDY, replace(PROMPT, emitted=start))
    assert refused.value.violations[0].field == "guided.grammar"


async def test_text_is_free_around_tags_but_not_inside(engine: PyTorchEngine) -> None:
    guide = Guide(GuideKind.STRUCTURAL_TAGS, tags=(Tag("<on>", '{"type": "boolean"}', "</on>", "<on>"),))
    start = tuple(TOKENIZER.encode("hm <on>", add_special_tokens=False).ids)
    rest = await answer(engine, guide, replace(SAMPLED, max_tokens=40), replace(PROMPT, emitted=start))
    assert re.match(r" ?(true|false)</on>", rest.text)


async def test_min_tokens_lasts_as_long_as_the_grammar_allows_more(engine: PyTorchEngine) -> None:
    way = replace(GREEDY, min_tokens=20, max_tokens=40)
    longer = await answer(engine, by_regex("ab+"), way)
    assert len(longer.ids) > 20
    assert (await answer(engine, by_regex("abc"), way)).text == "abc"


async def test_ignore_eos_lasts_as_long_as_the_grammar_allows_more(engine: PyTorchEngine) -> None:
    way = replace(GREEDY, ignore_eos=True, max_tokens=30)
    endless = await answer(engine, by_regex("ab+"), way)
    assert (endless.reason, len(endless.ids)) == (FinishReason.LENGTH, 30)
    ended = await answer(engine, by_regex("abc"), way)
    assert (ended.reason, ended.text) == (END, "abc")


async def test_max_tokens_cuts_the_answer_inside_the_grammar(engine: PyTorchEngine) -> None:
    cut = await answer(engine, by_regex("(abc){50}"), replace(GREEDY, max_tokens=7))
    assert cut.reason is FinishReason.LENGTH
    assert ("abc" * 50).startswith(cut.text)


async def test_a_stop_token_ends_the_answer_inside_the_grammar(engine: PyTorchEngine) -> None:
    whole = await answer(engine, by_regex("(xyz){5}"))
    stop = whole.ids[2]
    cut = await answer(engine, by_regex("(xyz){5}"), replace(GREEDY, stop_token_ids=frozenset({stop})))
    assert cut.reason is FinishReason.STOP_TOKEN
    assert cut.ids == whole.ids[: whole.ids.index(stop) + 1]


async def test_penalties_and_biases_cannot_leave_the_grammar(engine: PyTorchEngine) -> None:
    letters = {TOKENIZER.encode(letter, add_special_tokens=False).ids[0]: -100.0 for letter in "ab"}
    way = replace(SAMPLED, repetition_penalty=5.0, frequency_penalty=2.0, presence_penalty=2.0, logit_bias=letters)
    assert re.fullmatch("[ab]{30}", (await answer(engine, by_regex("[ab]{30}"), way)).text)


async def test_logprobs_are_those_of_the_model_without_the_grammar(engine: PyTorchEngine) -> None:
    free = await answer(engine, by_regex(r"(.|\n)*"), replace(GREEDY, max_tokens=1, logprobs=5))
    held = await answer(engine, by_regex("Q.*"), replace(GREEDY, max_tokens=1, logprobs=5))
    assert dict(held.logprobs[0].top) == pytest.approx(dict(free.logprobs[0].top))
    assert held.logprobs[0].logprob < held.logprobs[0].top[-1][1]


async def test_guided_and_free_requests_share_steps(engine: PyTorchEngine) -> None:
    async def free(seed: int) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        async for event in engine.decode(PROMPT, Sampling(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)):
            found += getattr(event, "ids", ())
        return found

    guided = by_schema(closed(a=FLAG, b=FLAG))
    alone = [await free(1), (await answer(engine, guided, SAMPLED)).ids, await free(2)]
    together = await asyncio.gather(free(1), answer(engine, guided, SAMPLED), free(2))
    assert [together[0], together[1].ids, together[2]] == alone


async def test_ids_that_the_grammar_does_not_allow_are_refused(engine: PyTorchEngine) -> None:
    emitted = tuple(TOKENIZER.encode("{]", add_special_tokens=False).ids)
    with pytest.raises(InvalidRequest, match="is not allowed by the grammar"):
        await answer(engine, by_schema(closed(a=FLAG)), GREEDY, replace(PROMPT, emitted=emitted))


async def test_a_grammar_that_cannot_be_compiled_is_refused(engine: PyTorchEngine) -> None:
    with pytest.raises(InvalidRequest, match=r"guided\.regex"):
        await answer(engine, by_regex("(a"))
    with pytest.raises(InvalidRequest, match="unknown special token"):
        await engine.prefill(PROMPT, replace(GREEDY, guide=Guide(GuideKind.GRAMMAR, "start: <|missing|>")))


async def test_the_first_token_of_a_prefill_follows_the_grammar(engine: PyTorchEngine) -> None:
    held = await engine.prefill(PROMPT, replace(GREEDY, guide=by_regex("Z.*")))
    assert TOKENIZER.decode([held.first_token]).startswith("Z")
    await held.release()


async def test_an_answer_that_is_complete_ends_at_once_when_it_is_continued(engine: PyTorchEngine) -> None:
    guide = by_regex("abc")
    whole = await answer(engine, guide)
    rest = await answer(engine, guide, GREEDY, Prompt(PROMPT.token_ids, emitted=whole.ids[:-1]))
    assert rest.ids == whole.ids[-1:]
    nothing = await answer(engine, guide, replace(GREEDY, ignore_eos=True), replace(PROMPT, emitted=whole.ids))
    assert (nothing.ids, nothing.reason) == ((), END)
