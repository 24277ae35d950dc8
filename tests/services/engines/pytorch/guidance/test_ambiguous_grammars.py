"""Grammars whose masks take long slow down their own requests, and no others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest
from support.engines.checkpoints import DEMO
from support.engines.embedded import Checkpoint
from support.engines.guided import GREEDY, PROMPT, TOKENIZER, answer, by_regex
from support.eventually import eventually
from support.lifetimes import in_one_task

from baton.errors import InvalidRequest
from grammars.guide import Guide, GuideKind
from services.engines.answer import Tokens
from services.engines.guidance import guidance
from services.engines.guidance.compiler import GrammarCompiler
from services.engines.guidance.vocabulary import open_vocabulary
from services.engines.prompt import Prompt
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.model import checkpoint

AMBIGUOUS = Guide(GuideKind.GRAMMAR, "start: e\ne: e e | e e e | T\nT: /[^\\n]/")
WORDS = tuple(TOKENIZER.encode("the lazy dog sees other things and " * 20, add_special_tokens=False).ids)
PLAIN = by_regex("[a-z ]{0,4000}")


@pytest.fixture(params=["library", "fused"])
async def engine(demo: Checkpoint, request: pytest.FixtureRequest) -> AsyncIterator[PyTorchEngine]:
    """The demo model, computed in both ways."""
    async with in_one_task(replace(demo, execution=request.param).engine(canary_seconds=None)) as running:
        yield running


async def count(engine: PyTorchEngine, guide: Guide, prompt: Prompt, counts: list[int]) -> None:
    """Counts the tokens of an endless answer in the one item of `counts`."""
    way = replace(GREEDY, ignore_eos=True, max_tokens=200, guide=guide)
    async with aclosing(engine.decode(prompt, way)) as events:
        async for event in events:
            counts[0] += len(event.ids) if isinstance(event, Tokens) else 0


async def test_an_ambiguous_grammar_does_not_hold_up_other_guided_answers(engine: PyTorchEngine) -> None:
    slow, quick = [0], [0]
    ambiguous = asyncio.create_task(count(engine, AMBIGUOUS, replace(PROMPT, emitted=WORDS[:36]), slow))
    async with asyncio.timeout(120):
        await eventually(lambda: slow[0] > 0, 100)
        before = slow[0]
        await count(engine, PLAIN, PROMPT, quick)
        during = slow[0] - before
    ambiguous.cancel()
    with pytest.raises((asyncio.CancelledError, InvalidRequest)):
        await ambiguous
    assert quick[0] == 200
    assert during < quick[0] / 4  # it would be as many, if both were in the same steps


async def test_an_answer_whose_masks_take_too_long_fails_by_the_name_of_its_grammar(
    engine: PyTorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guidance, "_SLOW_MASKS_SECONDS", 0.5)
    with pytest.raises(InvalidRequest, match=r"it is too ambiguous: .* mask.* more than") as refused:
        async with asyncio.timeout(120):
            await count(engine, AMBIGUOUS, replace(PROMPT, emitted=WORDS[:40]), [0])
    assert refused.value.violations[0].field == "guided.grammar"
    assert (await answer(engine, by_regex("abc"))).text == "abc"


async def test_following_what_was_emitted_leaves_room_for_other_grammars_and_ends() -> None:
    vocabulary = open_vocabulary(checkpoint.model_files(DEMO), TOKENIZER.get_vocab_size(), (0,))
    assert vocabulary is not None
    compiler = GrammarCompiler(vocabulary, replay_seconds=2.0)
    async with asyncio.timeout(60):
        ambiguous = asyncio.create_task(compiler.guidance(AMBIGUOUS, WORDS))
        for index in range(5):
            await compiler.guidance(by_regex(f"a{{{index + 1}}}"), ())
        assert not ambiguous.done()
        with pytest.raises(InvalidRequest, match="the emitted tokens takes more than 2 s") as refused:
            await ambiguous
    compiler.close()
    assert refused.value.violations[0].field == "guided.grammar"
