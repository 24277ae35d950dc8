"""Reasoning and tool calls in text: found in each format, however the text is cut, and never lost."""

import json
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.parsing import registry
from router.text.parsing.formats import DEEPSEEK, HERMES, LLAMA, MISTRAL, ToolFormat
from router.text.parsing.parts import Parser, Reasoning, ReasoningParser, Text, ToolCall

NAMES = {"weather", "now"}
FORMATS = [HERMES, LLAMA, MISTRAL, DEEPSEEK]
DEEPSEEK_TEXT = (
    'Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V3 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Oslo"}\n```'
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
ANSWERS = [
    ("hermes", HERMES, f'Let me see.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>\n'),
    ("llama", LLAMA, '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "now", "parameters": {}}'),
    (
        "llama typed",
        LLAMA,
        '\n{ "type": "function", "function": {"name": "weather", "parameters": {"city": "Oslo"}}};'
        '{"type": "function", "function": "now", "parameters": {}}',
    ),
    ("llama python tag", LLAMA, f'Let me see.<|python_tag|>{CALL}; {{"name": "now", "parameters": {{}}}}'),
    ("mistral", MISTRAL, f'Let me see.[TOOL_CALLS] [{CALL}, {{"name": "now", "arguments": {{}}}}]'),
    ("mistral each", MISTRAL, 'Let me see.[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}'),
    ("mistral ids", MISTRAL, '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}[TOOL_CALLS]now{}'),
    ("deepseek", DEEPSEEK, DEEPSEEK_TEXT),
    ("deepseek v3", DEEPSEEK, DEEPSEEK_V3),
]


def run(parser: Parser, pieces: Sequence[str]) -> list[Text | Reasoning | ToolCall]:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return [*parts, *parser.flush()]


def meaning(parts: Sequence[Text | Reasoning | ToolCall]) -> tuple[str, str, list[tuple[str, str]]]:
    text = "".join(part.text for part in parts if isinstance(part, Text))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return text, reasoning, [(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]


@pytest.mark.parametrize(("name", "tools", "answer"), ANSWERS, ids=[name for name, _, _ in ANSWERS])
def test_calls_are_found(name: str, tools: ToolFormat, answer: str) -> None:
    for pieces in ([answer], list(answer)):
        text, _, calls = meaning(run(tools.open(NAMES), pieces))
        assert calls == [("weather", '{"city": "Oslo"}'), ("now", "{}")]
        assert text == ("Let me see." if "Let me see." in answer else "")


@pytest.mark.parametrize(
    ("tools", "answer"),
    [
        (HERMES, f'<tool_call>{{"name": "weather", "arguments": %s}}</tool_call><tool_call>{CALL}</tool_call>'),
        (MISTRAL, f'[TOOL_CALLS][{{"name": "weather", "arguments": %s}}][TOOL_CALLS][{CALL}]'),
        (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]weather[ARGS]%s'),
        (LLAMA, f'Hm.<|python_tag|>{{"name": "weather", "parameters": %s}}; {CALL}'),
        (DEEPSEEK, DEEPSEEK_TEXT.replace("{}", "%s")),
        (DEEPSEEK, DEEPSEEK_V3.replace("{}", "%s")),
    ],
)
def test_markers_in_arguments_are_a_part_of_them(tools: ToolFormat, answer: str) -> None:
    written = json.dumps({"note": f'\\" {" ".join(tools.markers)} \\" \n```\\'}, ensure_ascii=False)
    for pieces in ([answer % written], list(answer % written)):
        text, _, calls = meaning(run(tools.open({"weather", "now"}), pieces))
        assert text in ("", "Hm.", "Let me see.")
        assert sorted(arguments for _, arguments in calls) == sorted([written, '{"city": "Oslo"}'])


@pytest.mark.parametrize("broken", ['{"name": "weather, "a": 1}', '{"name": "weather}', '{"name": "weather\n}'])
def test_a_quote_that_is_missing_costs_one_call(broken: str) -> None:
    answer = f"<tool_call>{broken}</tool_call> and <tool_call>{CALL}</tool_call> end"
    for pieces in ([answer], list(answer)):
        text, _, calls = meaning(run(HERMES.open(NAMES), pieces))
        assert calls == [("weather", '{"city": "Oslo"}')]
        assert text == f"<tool_call>{broken}</tool_call> and end"


def test_a_call_comes_as_soon_as_it_has_ended() -> None:
    parser = HERMES.open(NAMES)
    assert meaning(list(parser.push(f"<tool_call>{CALL}</tool_call>")))[2] == [("weather", '{"city": "Oslo"}')]


def test_text_that_can_be_no_call_is_not_held_back() -> None:
    for tools in FORMATS:
        parser = tools.open(NAMES)
        assert meaning(list(parser.push("Hello, ")))[0] == "Hello, "
        assert meaning(list(parser.push("you.")))[0] == "you."


BROKEN = [
    ("hermes", HERMES, '<tool_call>{"name": "weather", "arguments": {"city": }</tool_call>'),
    ("hermes list", HERMES, '<tool_call>{"name": "weather", "arguments": [1]}</tool_call> so'),
    ("hermes nan", HERMES, '<tool_call>{"name": "weather", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes huge", HERMES, '<tool_call>{"name": "weather", "arguments": {"x": 1e999}}</tool_call>'),
    ("hermes deep", HERMES, "<tool_call>" + "[" * 100_000 + "</tool_call>"),
    ("hermes unended", HERMES, f"<tool_call>{CALL}"),
    ("llama", LLAMA, '{"name": "weather", "parameters": {"city": '),
    ("llama unknown", LLAMA, '{"name": "Ann", "parameters": {}}'),
    ("llama data", LLAMA, '{"name": "weather", "parameters": {}} is what I would call.'),
    ("mistral", MISTRAL, "[TOOL_CALLS][{}]"),
    ("mistral prose", MISTRAL, "[TOOL_CALLS] is a marker"),
    ("deepseek", DEEPSEEK, "<｜tool▁calls▁begin｜>now<｜tool▁calls▁end｜>"),
    ("deepseek unended", DEEPSEEK, DEEPSEEK_TEXT.removesuffix("<｜tool▁calls▁end｜>").removeprefix("Let me see.")),
]


@pytest.mark.parametrize(("name", "tools", "answer"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_what_does_not_parse_comes_as_text(name: str, tools: ToolFormat, answer: str) -> None:
    assert meaning(run(tools.open(NAMES), [answer])) == (answer, "", [])


def test_reasoning_comes_apart_from_the_text() -> None:
    for pieces in (["<think>\nhm, 2</think>\n\nFour."], list("<think>\nhm, 2</think>\n\nFour.")):
        assert meaning(run(ReasoningParser(is_open=False), pieces)) == ("Four.", "hm, 2", [])
    for pieces in (["\nhm, 2</think>\n\nFour."], list("\nhm, 2</think>\n\nFour.")):
        assert meaning(run(ReasoningParser(is_open=True), pieces)) == ("Four.", "hm, 2", [])


def test_only_the_beginning_of_an_answer_is_reasoning() -> None:
    assert meaning(run(ReasoningParser(is_open=False), ["Say <think>x</think>"])) == ("Say <think>x</think>", "", [])


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<tool_", CALL, '{"name":', '"arguments": {}}', "{", "}", ";", "[TOOL_CALLS]",
        "[", "]", "[ARGS]", "weather", "<|python_tag|>", "<think>", "</think>", "</th", " ", "\n", "ä", "<", "|",
        *DEEPSEEK.markers, "function\n```json\n", "```",
    ]
)  # fmt: skip
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=5)), max_size=16).map("".join)
PARSERS: dict[str, Callable[[], Parser]] = {
    **{one.name: (lambda one=one: one.open(NAMES)) for one in FORMATS},  # type: ignore[misc]  # the default binds it
    "reasoning": lambda: ReasoningParser(is_open=False),
    "open reasoning": lambda: ReasoningParser(is_open=True),
}


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=400, deadline=None)
@given(text=TEXTS, seed=st.randoms(use_true_random=False))
def test_no_text_is_lost_however_it_is_cut(name: str, text: str, seed: object) -> None:
    pieces, position = [], 0
    while position < len(text):
        length = seed.randint(1, 7)  # type: ignore[attr-defined]  # a random.Random
        pieces.append(text[position : position + length])
        position += length
    parts = run(PARSERS[name](), pieces)
    assert "".join(part.raw for part in parts) == text
    assert meaning(parts) == meaning(run(PARSERS[name](), [text]))
    for _, arguments in meaning(parts)[2]:
        assert isinstance(json.loads(arguments), dict)
    # Text is shown as it is, but for white space around calls and reasoning.
    shown = [part for part in parts if isinstance(part, Text)]
    assert all(part.raw.endswith(part.text) and not part.raw.removesuffix(part.text).strip() for part in shown)


def test_a_long_block_is_searched_once() -> None:
    parser = HERMES.open(NAMES)
    pieces = ["<tool_call>", *["x" * 10] * 50_000]
    assert meaning(run(parser, pieces))[0] == "".join(pieces)


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> None:
    found = EntryPoints(
        [
            EntryPoint("xml", "support.engines.example_tool_format:FORMAT", registry.GROUP),
            EntryPoint("broken", "no.such.module:FORMAT", registry.GROUP),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: found.select(group=group))
    registry.tool_formats.cache_clear()
    yield  # type: ignore[misc]
    registry.tool_formats.cache_clear()


@pytest.mark.usefixtures("plugged")
def test_another_distribution_may_bring_a_format() -> None:
    tools = registry.format_of("... <call name=...> and <tool_call> ...")
    assert tools is not None
    assert tools.name == "xml"
    calls = meaning(run(tools.open(NAMES), ['On it. <call now {"zone": "UTC"}/>']))[2]
    assert calls == [("now", '{"zone": "UTC"}')]


def test_the_chat_template_tells_the_format() -> None:
    signs = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<｜tool▁calls▁begin｜>": "deepseek"}
    found = {sign: registry.format_of(f"{{{{ '{sign}' }}}}") for sign in signs}
    assert {sign: one.name for sign, one in found.items() if one} == signs
    assert registry.format_of("{{ messages }}") is None
