"""A guide in llguidance's own notation. Everything that can be wrong with a guide, found without a vocabulary."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from baton.errors import InvalidRequest
from grammars.guide import Guide, GuideKind, Tag, json_text
from grammars.schemas import read_schema

SpecialId = Callable[[str], int | None]

# Between the tokens of JSON: nothing, a space, or a new line with its indentation. Unbounded white space would let a
# model write white space until the end of its context.
_JSON_OPTIONS = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": r"(?:\n {0,32}| )?"}


# What special tokens look like: <tool_call>, <|python_tag|>, [TOOL_CALLS].
_MARKERS = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])")
# In Lark, what may contain the like of a special token, and the name of one.
_LARK_NAMES = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\])+/|(<[^<>\s]+>)')


def special_token_ids(tokenizer_json: bytes) -> dict[str, int]:
    """Returns the special tokens of a tokenizer and their ids; none without a tokenizer."""
    added = json.loads(tokenizer_json).get("added_tokens", []) if tokenizer_json else []
    return {each["content"]: int(each["id"]) for each in added if each.get("special")}


def no_special_tokens(_text: str) -> None:
    """For callers without a vocabulary."""


def grammar_source(guide: Guide, special_id: SpecialId = no_special_tokens) -> str:
    """Returns the guide as llguidance reads it; its reader checks that it is valid.

    `special_id` returns the id of a text that is a special token of the vocabulary, which tags are then written with.
    Raises InvalidRequest for what is found on the way.
    """
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(schema_source(guide))
        case GuideKind.REGEX:
            return LLMatcher.grammar_from_regex(guide.text)
        case GuideKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(_lark(guide, special_id))
        case GuideKind.CHOICE:
            return LLMatcher.grammar_from_lark(_choice(guide.choices))
        case GuideKind.STRUCTURAL_TAGS:
            return LLMatcher.grammar_from_lark(_tagged(guide, special_id))


def schema_source(guide: Guide) -> str:
    """Returns the schema of a guide of that kind, with llguidance's options. Raises InvalidRequest."""
    return _schema_source(guide.text, guide.field)


def lark_source(guide: Guide, special_id: SpecialId = no_special_tokens) -> str:
    """Returns a guide of grammar or tags in Lark's notation. Raises InvalidRequest."""
    return _tagged(guide, special_id) if guide.kind is GuideKind.STRUCTURAL_TAGS else _lark(guide, special_id)


def may_spell_any(guide: Guide, special_ids: Mapping[str, int]) -> bool:
    """True if text that the guide forces may have the name of a special token in it.

    Exact for texts. An expression or a grammar has many ways of writing a character, such as `[<]` and `\\x3c`, and may
    be split: it may spell a name if it has the name's first character, or any character by its number.
    """
    schemas = [guide.text] if guide.kind is GuideKind.JSON_SCHEMA else [tag.schema for tag in guide.tags]
    # Written again, schemas are without JSON's escapes.
    written = [_schema_source(schema, guide.field) for schema in schemas]
    if any(name in text for name in special_ids for text in (*guide.choices, *written)):
        return True
    is_expression = guide.kind in (GuideKind.REGEX, GuideKind.GRAMMAR)
    expressions = [guide.text] if is_expression else [text for text in written if '"pattern' in text]
    signs = {name[0] for name in special_ids if name} | {"\\x", "\\u", "\\U"}
    return bool(special_ids) and any(sign in text for sign in signs for text in expressions)


def unforced_source(guide: Guide, special_id: SpecialId) -> str:
    """Returns any guide in Lark's notation, and text in it is never tokenized. Raises InvalidRequest."""
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            source = f"start: %json {schema_source(guide)}"
        case GuideKind.REGEX:
            source = json.loads(LLMatcher.grammar_from_regex(guide.text))["grammars"][0]["lark_grammar"]
        case GuideKind.CHOICE:
            source = _choice(guide.choices)
        case _:
            source = lark_source(guide, special_id)
    return f'%llguidance {{"no_forcing": true}}\n{source}'


def _schema_source(text: str, path: str) -> str:
    schema = read_schema(text, path)
    # Options are read from an object only.
    whole = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return json.dumps({**whole, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def _lark(guide: Guide, special_id: SpecialId) -> str:
    try:
        source = any_to_lark(guide.text)
    except Exception as error:  # as it raises for a rule that is missing, or is there twice
        raise InvalidRequest.of(guide.field, f"is not a grammar in GBNF: {error}") from None
    return _LARK_NAMES.sub(lambda found: _by_id(found, special_id), source)


def _by_id(found: re.Match[str], special_id: SpecialId) -> str:
    token = special_id(found[1]) if found[1] else None
    return found[0] if token is None else f"<[{token}]>"


def _choice(texts: Sequence[str]) -> str:
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest.of(f"guided.choice.texts[{index}]", "is empty")
    return "start: " + " | ".join(json_text(text) for text in texts)


def _tagged(guide: Guide, special_id: SpecialId) -> str:
    for index, tag in enumerate(guide.tags):
        _check_tag(f"{guide.field}.tags[{index}]", tag)
    names = " | ".join(f"tag_{index}" for index in range(len(guide.tags)))
    rules = [f"start: {names}"]
    if not guide.needs_tag:
        rules = [f"start: ({names})* text_end", "text_end: TEXT", r"TEXT: /(.|\n)*/"]
    for index, tag in enumerate(guide.tags):
        rules += _tag_rules(index, tag, guide.needs_tag, special_id)
    return "\n".join(rules) + "\n"


def _check_tag(path: str, tag: Tag) -> None:
    if not tag.begin:
        raise InvalidRequest.of(f"{path}.begin", "is empty")
    if not tag.begin.startswith(tag.trigger):
        raise InvalidRequest.of(f"{path}.begin", "does not begin with the trigger")


def _tag_rules(index: int, tag: Tag, is_alone: bool, special_id: SpecialId) -> list[str]:
    schema = _schema_source(tag.schema, f"guided.structural_tags.tags[{index}].json_schema")
    part = f"%json {schema} {_literal(tag.end, special_id)}"
    if is_alone:
        return [f"tag_{index}: {_literal(tag.begin, special_id)} {part}"]
    rest = _literal(tag.begin[len(tag.trigger) :], special_id)
    if special_id(tag.trigger) is not None:
        return [f"tag_{index}: TEXT {_literal(tag.trigger, special_id)} {rest} {part}"]
    # A lazy rule ends at the first trigger: text never contains one.
    trigger = f"trigger_{index}[lazy]: TEXT {json_text(tag.trigger)}"
    return [trigger, f"tag_{index}: trigger_{index} {rest} {part}"]


def _literal(text: str, special_id: SpecialId) -> str:
    """The text as Lark writes it, with the special tokens in it as tokens."""
    pieces = [(piece, special_id(piece) if _MARKERS.fullmatch(piece) else None) for piece in _MARKERS.split(text)]
    return " ".join(json_text(piece) if token is None else f"<[{token}]>" for piece, token in pieces if piece)


# Bounds of time and memory, in the units of llguidance: a compilation, and the mask of one token. They stop expressions
# and schemas that grow exponentially. Errors must not repeat the parser's state to the client.
PARSER_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)

_LONGEST_ERROR = 500


def check_guide(guide: Guide) -> None:
    """Raises InvalidRequest naming the field, and in a schema the keyword. Slow: call it in a thread."""
    with panics_refused(guide):
        is_wrong, errors = LLMatcher.validate_grammar_with_warnings(grammar_source(guide), None, limits=PARSER_LIMITS)
    if is_wrong:
        raise refusal(guide, errors[0] if errors else "cannot be compiled")


@contextmanager
def panics_refused(guide: Guide) -> Iterator[None]:
    """Makes a refusal of a panic of llguidance, in which some wrong schemas end."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise InvalidRequest.of(guide.field, "cannot be compiled") from None


def is_panic(error: BaseException) -> bool:
    """True for a panic of compiled code, whose class is no Exception and cannot be imported."""
    return type(error).__name__ == "PanicException"


def refusal(guide: Guide, error: str) -> InvalidRequest:
    """The error for a guide that llguidance refuses."""
    # llguidance lists the special tokens by the names that it has for them.
    reason = re.sub("; following special tokens are available: [^\n]*", "", error)
    return InvalidRequest.of(guide.field, reason.strip()[:_LONGEST_ERROR])
