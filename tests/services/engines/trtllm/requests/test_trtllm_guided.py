"""Guided decoding goes to TensorRT-LLM in its own form, or is refused with the reason."""

import re
from pathlib import Path

import pytest
from fake_tensorrt_llm.llm import RUNNING
from support.engines import trtllm

from baton.errors import Unsupported
from grammars.guide import Guide, GuideKind
from services.engines.prompt import Prompt, Sampling
from services.engines.trtllm.package import open_package
from services.engines.trtllm.requests.request_builder import Budget, sampling_params

SCHEMA = '{"type": "object"}'


def guided(guide: Guide) -> Sampling:
    return Sampling(max_tokens=5, guide=guide)


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize(
    ("guide", "field", "value"),
    [
        (Guide(GuideKind.JSON_SCHEMA, SCHEMA), "json", SCHEMA),
        (Guide(GuideKind.JSON_SCHEMA, ""), "json", SCHEMA),
        (Guide(GuideKind.REGEX, "a+"), "regex", "a+"),
        (Guide(GuideKind.GRAMMAR, 'root ::= "a"'), "grammar", 'root ::= "a"'),
    ],
)
def test_a_grammar_becomes_guided_decoding_params(guide: Guide, field: str, value: str) -> None:
    made = sampling_params(open_package(), guided(guide), Budget(5, 0), (2,))
    assert getattr(made.guided_decoding, field) == value


@pytest.mark.usefixtures("newest")
def test_choices_are_an_expression_of_these_texts() -> None:
    texts = ("yes", "no (never)", "1.5", "a|b")
    made = sampling_params(open_package(), guided(Guide(GuideKind.CHOICE, choices=texts)), Budget(5, 0), (2,))
    expression = re.compile(made.guided_decoding.regex)
    assert all(expression.fullmatch(text) for text in texts)
    assert not any(expression.fullmatch(text) for text in ("1x5", "a", "no never", ""))


@pytest.mark.usefixtures("newest")
def test_grammars_that_it_does_not_read_are_refused() -> None:
    for guide in (Guide(GuideKind.GRAMMAR, 'start: "a"'), Guide(GuideKind.STRUCTURAL_TAGS)):
        with pytest.raises(Unsupported, match=guide.field):
            sampling_params(open_package(), guided(guide), Budget(5, 0), (2,))


@pytest.mark.usefixtures("newest")
async def test_the_backend_that_is_configured_decides(checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, {"guided_decoding_backend": "xgrammar"}) as engine:
        assert engine.facts.guided_decoding
        assert not RUNNING[0].given["skip_tokenizer_init"]
        held = await engine.prefill(Prompt((5, 6, 7)), guided(Guide(GuideKind.REGEX, "a+")))
        await held.release()
        with pytest.raises(Unsupported, match="cannot continue an answer inside its grammar"):
            async for _ in engine.decode(Prompt((5, 6, 7), emitted=(8,)), guided(Guide(GuideKind.REGEX, "a+"))):
                pass
    async with trtllm.open_engine(checkpoint) as plain:
        assert not plain.facts.guided_decoding
        assert RUNNING[0].given["skip_tokenizer_init"]
