"""The arguments of a call while the model writes it: in pieces, which are the whole once it is complete."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.parsing.formats import DEEPSEEK, HERMES, LLAMA, MISTRAL, ToolFormat
from router.text.parsing.registry import AnswerParser, Parsed

ARGUMENTS = '{ "path": "a \\"b\\" \\\\", "text": "</tool_call> {[}", "list": [1, {"deep": "ünï"}], "end": "\\\\"}'
CALL = f'<tool_call>\n{{"name": "write", "arguments": {ARGUMENTS}}}\n</tool_call>'


def parser(*names: str, is_single: bool = False) -> AnswerParser:
    return AnswerParser(None, HERMES, names or ("write",), call_id="x", is_single=is_single, grows=True)


def parsed(text: str, cut: random.Random | None = None, **options: bool) -> Parsed:
    """All that a parser makes of a text that comes in pieces, of one character unless `cut` chooses them."""
    made, reader, at = Parsed(), parser(**options), 0
    while at < len(text):
        length = cut.randint(1, 12) if cut else 1
        add(made, reader.push(text[at : at + length]))
        at += length
    add(made, reader.flush())
    return made


def add(made: Parsed, more: Parsed) -> None:
    made.text += more.text
    made.tool_calls += more.tool_calls
    made.call_deltas += more.call_deltas


@pytest.mark.parametrize("seed", range(20))
def test_the_pieces_are_the_arguments_however_the_text_is_cut(seed: int) -> None:
    made = parsed(f"So: {CALL}\n{CALL} Done.", random.Random(seed) if seed else None)
    assert made.text == "So: Done."
    assert len(made.tool_calls) == 2
    for index, call in enumerate(made.tool_calls):
        pieces = [one for one in made.call_deltas if one.index == index]
        assert "".join(one.arguments for one in pieces) == ARGUMENTS
        assert [(one.id, one.name) for one in pieces if one.id or one.name] == [(call.id, "write")]
        assert json.loads(call.arguments) == json.loads(ARGUMENTS)
        assert len(pieces) > 3


def test_a_piece_comes_as_soon_as_the_text_does() -> None:
    reader = parser()
    assert reader.push('<tool_call>{"name": "write", "arg').call_deltas == []
    [first] = reader.push('uments": {"path').call_deltas
    assert (first.name, first.arguments) == ("write", '{"path')
    assert [one.arguments for one in reader.push('": "a').call_deltas] == ['": "a']
    assert reader.push("\\").call_deltas == []


def test_a_call_that_is_cut_stays_a_beginning_and_is_no_text() -> None:
    made = parsed(CALL[:60])
    assert (made.text, made.tool_calls) == ("", [])
    assert ARGUMENTS.startswith("".join(one.arguments for one in made.call_deltas))
    assert made.call_deltas


def test_a_block_that_turns_out_to_be_no_call_is_not_sent_twice() -> None:
    made = parsed('So: <tool_call>{"name": "write", "arguments": {"a": oops}}</tool_call> Done.')
    assert (made.text, made.tool_calls) == ("So:  Done.", [])
    assert "".join(one.arguments for one in made.call_deltas) == '{"a": oops}'


@pytest.mark.parametrize(
    "block",
    [
        '{"name": "other", "arguments": {"a": 1}}',
        '{"arguments": {"a": 1}, "name": "write"}',
        '{"name": "write", "arguments": "{\\"a\\": 1}"}',
        '{"name": "wr\\u0069te", "arguments": {"a": 1}}',
    ],
)
def test_a_call_that_is_written_otherwise_comes_whole(block: str) -> None:
    made = parsed(f"<tool_call>{block}</tool_call>")
    assert made.call_deltas == []
    assert [json.loads(call.arguments) for call in made.tool_calls] == [{"a": 1}]


def test_nothing_comes_after_a_single_call() -> None:
    made = parsed(CALL + CALL, is_single=True)
    assert (len(made.tool_calls), {one.index for one in made.call_deltas}) == (1, {0})


def test_a_format_whose_calls_do_not_grow_gives_them_whole() -> None:
    reader = AnswerParser(None, replace(LLAMA, open_growing=None), ("write",), call_id="x", grows=True)
    assert reader.push('{"name": "write", "parameters": {"a": 1}}').call_deltas == []
    assert [call.name for call in reader.flush().tool_calls] == ["write"]


@pytest.mark.parametrize("length", [1, 1000])
def test_a_call_after_one_that_turned_out_to_be_none_is_another_one(length: int) -> None:
    broken = '<tool_call>{"name": "write", "arguments": {"a": "oops}}\n</tool_call>'
    made, reader, text = Parsed(), parser(), f"{broken}So: {CALL}"
    for at in range(0, len(text), length):
        add(made, reader.push(text[at : at + length]))
    add(made, reader.flush())
    [call] = made.tool_calls
    heads = [(one.index, one.id) for one in made.call_deltas if one.id]
    assert [index for index, _ in heads] == [0, 1]
    assert heads[1][1] == call.id != heads[0][1]
    assert "".join(one.arguments for one in made.call_deltas if one.index == 1) == ARGUMENTS
    assert "So" not in "".join(one.arguments for one in made.call_deltas if one.index == 0)


OBJECT = '{"name": "write", "%s": ' + ARGUMENTS + "}"
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
# A format, and two calls as its models write them.
WRITTEN: dict[str, tuple[ToolFormat, str]] = {
    "llama": (LLAMA, "; ".join([OBJECT % "parameters"] * 2)),
    "llama with a tag": (LLAMA, "<|python_tag|>" + "; ".join([OBJECT % "parameters"] * 2)),
    "mistral's list": (MISTRAL, f"[TOOL_CALLS][{', '.join([OBJECT % 'arguments'] * 2)}]"),
    "mistral's names": (MISTRAL, f"[TOOL_CALLS]write[CALL_ID]a1[ARGS]{ARGUMENTS}" * 2),
    "deepseek": (
        DEEPSEEK,
        f"<｜tool▁calls▁begin｜>{f'{_BEGIN}write{_SEP}{ARGUMENTS}{_END}' * 2}<｜tool▁calls▁end｜>",
    ),
    "deepseek's blocks of code": (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜>"
        + f"{_BEGIN}function{_SEP}write\n```json\n{ARGUMENTS}\n```{_END}" * 2
        + "<｜tool▁calls▁end｜>",
    ),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", WRITTEN)
def test_the_first_call_of_each_format_grows_and_all_are_complete(name: str, seed: int) -> None:
    written, text = WRITTEN[name]
    made, reader = Parsed(), AnswerParser(None, written, ("write",), call_id="x", grows=True)
    cut, at = random.Random(seed), 0
    while at < len(text):
        length = cut.randint(1, 12) if seed else 1
        add(made, reader.push(text[at : at + length]))
        at += length
    before = len(made.call_deltas)
    add(made, reader.flush())
    assert made.text == ""
    assert [(call.name, json.loads(call.arguments)) for call in made.tool_calls] == [
        ("write", json.loads(ARGUMENTS))
    ] * 2
    first = [one for one in made.call_deltas if one.index == 0]
    assert "".join(one.arguments for one in first) == ARGUMENTS
    assert [(one.id, one.name) for one in first if one.id or one.name] == [(made.tool_calls[0].id, "write")]
    assert min(before, len(first)) > 3


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_of_each_format_that_is_cut_is_no_text(name: str) -> None:
    written, text = WRITTEN[name]
    made, reader = Parsed(), AnswerParser(None, written, ("write",), call_id="x", grows=True)
    for character in text[: text.index("ünï")]:
        add(made, reader.push(character))
    add(made, reader.flush())
    assert (made.text, made.tool_calls) == ("", [])
    assert ARGUMENTS.startswith("".join(one.arguments for one in made.call_deltas))


def test_an_object_that_is_an_answer_and_no_call_is_text() -> None:
    reader = AnswerParser(None, LLAMA, ("write",), call_id="x", grows=True)
    made, text = Parsed(), '{"name": "Oslo", "parameters": {"a": 1}}'
    for character in text:
        add(made, reader.push(character))
    add(made, reader.flush())
    assert (made.text, made.tool_calls, made.call_deltas) == (text, [], [])


def test_a_head_that_never_ends_is_not_looked_for_again_and_again() -> None:
    reader = AnswerParser(None, DEEPSEEK, ("write",), call_id="x", grows=True)
    made, text = Parsed(), f"<｜tool▁calls▁begin｜>{_BEGIN}{'x' * 2000}{_SEP}{{}}"
    for character in text:
        add(made, reader.push(character))
    add(made, reader.flush())
    assert made.call_deltas == []
    assert len(made.text) == len(text)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "write", "parameters": {"a": 1}, "arguments": {"a": 2}}',
        '{"name": "write", "arguments": {"a": 1}, "arguments": {"a": 2}}',
        '{"name": "write", "arguments": {"a": 1}, "name": "erase"}',
        '{"name": "write", "arguments": {"a": 1}, "function": {"name": "erase", "arguments": {"a": 2}}}',
    ],
)
@pytest.mark.parametrize(
    ("written", "frame"),
    [
        (HERMES, "<tool_call>%s</tool_call>"),
        (LLAMA, "%s"),
        (LLAMA, "<|python_tag|>%s"),
        (MISTRAL, "[TOOL_CALLS][%s]"),
    ],
)
def test_a_call_that_is_read_otherwise_once_it_is_whole_is_none(written: ToolFormat, frame: str, call: str) -> None:
    reader = AnswerParser(None, written, ("write", "erase"), call_id="x", grows=True)
    made = Parsed()
    for character in frame % call:
        add(made, reader.push(character))
    add(made, reader.flush())
    assert "".join(one.arguments for one in made.call_deltas) == '{"a": 1}'
    assert (made.text, made.tool_calls) == ("", [])


_TEXTS = st.text(st.sampled_from('a"\\{}[]\n ü<>;'), max_size=8)
_VALUES = st.one_of(_TEXTS, st.integers(), st.lists(_TEXTS, max_size=2), st.dictionaries(_TEXTS, _TEXTS, max_size=2))
_DAMAGE = ("", "", '"', "\\", "}", "{", '"arguments": ', ', "name": "erase"', "\\ud800", "[TOOL_CALLS]", "</tool_call>")


@pytest.mark.parametrize("name", [*WRITTEN, "hermes"])
@given(st.dictionaries(_TEXTS, _VALUES, max_size=3), st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_what_comes_in_pieces_is_what_is_read_of_the_whole(name: str, arguments: object, data: st.DataObject) -> None:
    written, text = WRITTEN.get(name, (HERMES, f"{CALL} and {CALL}"))
    text = text.replace(ARGUMENTS, json.dumps(arguments, ensure_ascii=data.draw(st.booleans())))
    at, lost = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 3))
    text = text[:at] + data.draw(st.sampled_from(_DAMAGE)) + text[at + lost :]
    whole, grown = AnswerParser(None, written, ("write",), call_id="x"), Parsed()
    expected = whole.push(text)
    add(expected, whole.flush())
    reader = AnswerParser(None, written, ("write",), call_id="x", grows=True)
    while text:
        length = data.draw(st.integers(1, 30))
        add(grown, reader.push(text[:length]))
        text = text[length:]
    add(grown, reader.flush())
    pieces: dict[int, str] = {}
    for one in grown.call_deltas:
        pieces[one.index] = pieces.get(one.index, "") + one.arguments
    begun = {one.id: pieces[one.index] for one in grown.call_deltas if one.id}
    calls = {call.id: call for call in grown.tool_calls}
    for identity, joined in begun.items():
        if identity in calls:
            assert json.loads(joined) == json.loads(calls[identity].arguments)
    if begun.keys() <= calls.keys():  # none was broken
        assert [(call.name, call.arguments) for call in grown.tool_calls] == [
            (call.name, call.arguments) for call in expected.tool_calls
        ]
        assert grown.text == expected.text


@pytest.mark.parametrize("grows", [True, False])
def test_half_a_surrogate_pair_in_a_call_ends_no_answer(grows: bool) -> None:
    reader = AnswerParser(None, HERMES, ("write",), call_id="x", grows=grows)
    made = reader.push('<tool_call>{"name": "write", "arguments": {"a": "\\ud800"}}</tool_call>')
    add(made, reader.push('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'))
    add(made, reader.flush())
    assert [call.arguments for call in made.tool_calls] == ['{"a": "\\ud800"}']
    assert made.text == '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
