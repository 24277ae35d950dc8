"""The formats in which models write tool calls.

hermes    Hermes, Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
llama     Llama 3.1 and later: `{"name": ..., "parameters": {...}}`, `;` between, as the whole answer or after
          `<|python_tag|>`
mistral   Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each
deepseek  DeepSeek V3 and R1: for each, between two more markers,
          `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from router.text.parsing.blocks import BlockParser, GrowingArguments, WholeAnswerParser
from router.text.parsing.parts import Parser

# From a tool's name: what is written before and after the arguments of a call.
CallFrame = Callable[[str], tuple[str, str]]

_Call = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls.

    A model has it if its chat template contains one of `signs`. `markers` are the special tokens that calls are written
    with; others are omitted from the text that is parsed. `open` makes a parser for one answer, from the names of the
    tools that were offered. A call's id has `id_length` letters and digits after `id_prefix`. `frame` returns what is
    written before and after the arguments of a call that guided decoding makes, and `trigger` is how each call begins;
    a format without them takes no tool choice and no strict tools. `open_growing` makes a parser that also finds the
    arguments of a call while they are written; calls of a format without it come whole.
    """

    name: str
    signs: tuple[str, ...]
    markers: tuple[str, ...]
    open: Callable[[Collection[str]], Parser]
    id_prefix: str = "call_"
    id_length: int = 24
    frame: CallFrame | None = None
    trigger: str = ""
    open_growing: Callable[[Collection[str]], Parser] | None = None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _arguments(value: Any) -> str:
    """The arguments as the text of a JSON object. Raises ValueError if they are none."""
    if isinstance(value, str):
        value = _DECODER.decode(value)
    if not isinstance(value, dict):
        raise ValueError("the arguments are not an object")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half of a pair of surrogates, which JSON can name, is no text.
    return text if _is_text(text) else json.dumps(value, allow_nan=False)


def _is_text(characters: str) -> bool:
    try:
        return bool(characters.encode())
    except UnicodeEncodeError:
        return False


def _call(value: Any) -> _Call:
    """The call that a JSON value describes. Raises ValueError if it is none."""
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    inner = value.get("function")
    described = inner if isinstance(inner, dict) else value
    name = described.get("name", inner)
    if not (isinstance(name, str) and _is_text(name)):
        raise ValueError("a call has a name")
    given = [described[key] for key in ("arguments", "parameters") if key in described]
    return name, _arguments(given[0] if given else {})


def _reader(read: Callable[[str], Sequence[_Call]]) -> Callable[[str], Sequence[_Call] | None]:
    def reading(body: str) -> Sequence[_Call] | None:
        try:
            return read(body)
        except (ValueError, RecursionError):
            return None

    return reading


@_reader
def _read_hermes(body: str) -> list[_Call]:
    return [_call(_DECODER.decode(body))]


@_reader
def _read_llama(body: str) -> list[_Call]:
    calls, position = [], 0
    body = body.strip()
    while position < len(body):
        value, position = _DECODER.raw_decode(body, position)
        calls.append(_call(value))
        between = body[position:].lstrip(" \t\r\n")
        if between and not between.startswith(";"):
            raise ValueError("calls are separated by ;")
        position = len(body) - len(between[1:].lstrip(" \t\r\n"))
    return calls


_MISTRAL_CALL = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


@_reader
def _read_mistral(body: str) -> list[_Call]:
    if body.lstrip().startswith("["):
        return [_call(value) for value in _DECODER.decode(body)]
    found = _MISTRAL_CALL.fullmatch(body)
    if not found:
        raise ValueError("neither a list of calls nor a name with arguments")
    return [(found[1], _arguments(found[2]))]


_DEEPSEEK = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


# Up to V3: `function`, then the name on a line, then the arguments as a block of code.
_DEEPSEEK_CALL = re.compile(
    r"\s*{0}(?:function{1}([^\n]+)\n\s*(?:```json)?|((?:(?!{1}).)+){1})\s*".format(*_DEEPSEEK), re.DOTALL
)
_DEEPSEEK_END = re.compile(rf"\s*(?:```\s*)?{_DEEPSEEK[2]}\s*")


@_reader
def _read_deepseek(body: str) -> list[_Call]:
    calls, position = [], 0
    while position < len(body):
        head = _DEEPSEEK_CALL.match(body, position)
        if not head:
            raise ValueError("a call begins with its markers")
        value, position = _DECODER.raw_decode(body, head.end())
        calls.append(((head[1] or head[2]).strip(), _arguments(value)))
        end = _DEEPSEEK_END.match(body, position)
        if not end:
            raise ValueError("a call ends with its marker")
        position = end.end()
    return calls


def _known(names: Collection[str]) -> Callable[[str], Sequence[_Call] | None]:
    """Reads an answer without markers as calls only if all are of tools that were offered."""

    def read(body: str) -> Sequence[_Call] | None:
        calls = _read_llama(body)
        return calls if calls and all(name in names for name, _ in calls) else None

    return read


def _head(begin: str) -> "re.Pattern[str]":
    """The beginning of a call, with its marker; the next character begins the arguments."""
    return re.compile(begin + r"\s*(?=\{)", re.DOTALL)


_NAMED = r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:'
_HERMES_HEAD = _head("<tool_call>" + _NAMED)
_LLAMA_HEAD, _PYTHON_TAG_HEAD = _head(_NAMED), _head(r"<\|python_tag\|>" + _NAMED)
_MISTRAL_HEAD = _head(rf"\[TOOL_CALLS\](?:\s*\[{_NAMED}|\s*([\w.\-]+)(?:\[CALL_ID\]\w+)?\[ARGS\])")
_DEEPSEEK_HEAD = _head("<｜tool▁calls▁begin｜>" + _DEEPSEEK_CALL.pattern)

HERMES = ToolFormat(
    "hermes",
    ("<tool_call>",),
    ("<tool_call>", "</tool_call>"),
    lambda _: BlockParser("<tool_call>", "</tool_call>", _read_hermes),
    frame=lambda name: (f'<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"),
    trigger="<tool_call>",
    open_growing=lambda names: BlockParser(
        "<tool_call>", "</tool_call>", _read_hermes, lambda: GrowingArguments(_HERMES_HEAD, names)
    ),
)
_LLAMA_OPENINGS = '{"name":', '{"type":"function"', '{"function":'
LLAMA = ToolFormat(
    "llama",
    ("<|python_tag|>", "Environment: ipython"),
    ("<|python_tag|>",),
    lambda names: WholeAnswerParser(
        _LLAMA_OPENINGS,
        _known(names),
        BlockParser("<|python_tag|>", "", _read_llama),
    ),
    frame=lambda name: (f'{{"name": "{name}", "parameters": ', "}"),
    trigger='{"name": ',
    open_growing=lambda names: WholeAnswerParser(
        _LLAMA_OPENINGS,
        _known(names),
        BlockParser("<|python_tag|>", "", _read_llama, lambda: GrowingArguments(_PYTHON_TAG_HEAD, names)),
        GrowingArguments(_LLAMA_HEAD, names),
    ),
)
MISTRAL = ToolFormat(
    "mistral",
    ("[TOOL_CALLS]",),
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    lambda _: BlockParser("[TOOL_CALLS]", "", _read_mistral),
    id_prefix="",
    id_length=9,  # the template refuses other lengths
    frame=lambda name: (f'[TOOL_CALLS][{{"name": "{name}", "arguments": ', "}]"),
    trigger="[TOOL_CALLS]",
    open_growing=lambda names: BlockParser(
        "[TOOL_CALLS]", "", _read_mistral, lambda: GrowingArguments(_MISTRAL_HEAD, names)
    ),
)
DEEPSEEK = ToolFormat(
    "deepseek",
    ("<｜tool▁calls▁begin｜>",),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", *_DEEPSEEK),
    lambda _: BlockParser("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _read_deepseek),
    frame=lambda name: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    trigger="<｜tool▁calls▁begin｜>",
    open_growing=lambda names: BlockParser(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _read_deepseek,
        lambda: GrowingArguments(_DEEPSEEK_HEAD, names),
    ),
)
