"""Grammars in vLLM's words, and which are refused before vLLM has them; without vLLM."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.engines.checkpoints import DEMO

from baton.errors import ConfigError, InvalidRequest, Unsupported
from grammars.guide import Guide, GuideKind, Tag
from grammars.source import special_token_ids
from services.engines.prompt import Prompt, Sampling
from services.engines.vllm.config import VllmConfig
from services.engines.vllm.factory import check, resolve
from services.engines.vllm.requests.sampling import GuideChecks, Plan, check_guided, plan, structured_outputs

SPECIAL = special_token_ids((DEMO / "tokenizer.json").read_bytes())
CHOICE = Guide(GuideKind.CHOICE, choices=("yes", "no"))


def test_expressions_and_choices_go_to_vllm_as_they_are() -> None:
    assert structured_outputs(dict, CHOICE, {}) == {"choice": ["yes", "no"]}
    assert structured_outputs(dict, Guide(GuideKind.REGEX, "[0-9]+"), {}) == {"regex": "[0-9]+"}


def test_schemas_have_the_white_space_of_our_own_engine() -> None:
    made = structured_outputs(dict, Guide(GuideKind.JSON_SCHEMA, '{"type": "integer"}'), {})
    schema = json.loads(made["json"])
    assert (schema["type"], schema["x-guidance"]["lenient"]) == ("integer", False)


def test_gbnf_and_tags_become_larks_notation() -> None:
    gbnf = structured_outputs(dict, Guide(GuideKind.GRAMMAR, 'root ::= "a" | "b"'), {})
    assert "::=" not in gbnf["grammar"]
    tags = Guide(GuideKind.STRUCTURAL_TAGS, tags=(Tag("<image>", "{}", "<|user|>", "<image>"),), needs_tag=True)
    written = structured_outputs(dict, tags, SPECIAL)["grammar"]
    assert "<[6]>" in written


@pytest.mark.parametrize(
    "guide",
    [
        Guide(GuideKind.CHOICE, choices=("<image>",)),
        Guide(GuideKind.REGEX, "a/<image>[0-9]?"),
        Guide(GuideKind.JSON_SCHEMA, '{"const": "\\u003cimage>"}'),
        Guide(GuideKind.GRAMMAR, 'start: "<image>"'),
        Guide(GuideKind.STRUCTURAL_TAGS, tags=(Tag("a", '{"const": "<image>"}', "b", "a"),), needs_tag=True),
        Guide(GuideKind.REGEX, "[<]image>x"),
        Guide(GuideKind.REGEX, r"\x3cimage\u003ex"),
        Guide(GuideKind.REGEX, "<(im)(?:age>)x"),
        Guide(GuideKind.GRAMMAR, 'start: "<" "image>" "x"'),
        Guide(GuideKind.GRAMMAR, 'start: A B\nA: "<ima"\nB: "ge>x"'),
        Guide(GuideKind.JSON_SCHEMA, '{"type": "string", "pattern": "^[<]image>$"}'),
    ],
    ids=lambda guide: f"{guide.kind.value} {guide.text}",
)
def test_text_that_spells_a_special_token_is_never_tokenized_by_vllm(guide: Guide) -> None:
    written = structured_outputs(dict, guide, SPECIAL)["grammar"]
    tokenizer = LLTokenizer((DEMO / "tokenizer.json").read_text(), eos_token=[SPECIAL["<|eos|>"]])
    matcher = LLMatcher(tokenizer, written, log_level=0)
    while not matcher.is_accepting():
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(tokenizer.vocab_size) if mask[token // 8] >> token % 8 & 1]
        assert allowed, matcher.get_error()
        assert SPECIAL["<image>"] not in allowed
        assert matcher.consume_token(allowed[-1])


def test_special_tokens_are_those_of_the_tokenizer() -> None:
    assert SPECIAL["<image>"] == 6
    assert special_token_ids(b"") == {}


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_options_that_leave_a_complete_grammar_no_token_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(Unsupported, match="ignore_eos or min_tokens"):
        check_guided(Sampling(max_tokens=9, guide=CHOICE, **options))  # type: ignore[arg-type]
    check_guided(Sampling(max_tokens=9, guide=CHOICE))


async def test_a_wrong_grammar_is_refused_by_its_field() -> None:
    checks = GuideChecks()
    await checks.check(CHOICE)
    await checks.check(None)
    with pytest.raises(InvalidRequest) as refused:
        await checks.check(Guide(GuideKind.REGEX, "(unclosed"))
    assert refused.value.violations[0].field == "guided.regex"
    checks.close()


def test_a_guided_answer_runs_again_from_its_start() -> None:
    prompt = Prompt((5, 6), emitted=(7,))
    assert plan(prompt, Sampling(max_tokens=9, temperature=0.0, guide=CHOICE)) == Plan((5, 6), (7,))


def test_a_model_without_a_tokenizer_cannot_be_guided() -> None:
    config = VllmConfig.model_validate({"model": "some/folder", "guided_decoding": True})
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        check(config, resolve(config), ("decode",), lease_seconds=10.0)
