"""Renders a model's chat template as Hugging Face transformers does, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn, TypeAlias

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rpc.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ImagePart:
    """Where an image stands in a message."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation: its text, or, if there are images in it, its parts."""

    role: str
    content: str | Sequence[str | ImagePart]


# What a template is given for one message: a text, or a list of objects with a `type`.
_Content: TypeAlias = str | list[dict[str, str]]

_PROBE = "a_word_that_no_template_has"
_SPILT = ("'type': 'text'", '"type": "text"')  # a list that was written down instead of being read


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template. `special_tokens` are variables such as bos_token.

    Some templates take a message's content as a text, some as a list of parts, some either way; each gets what it
    takes. To one that takes texts only, `placeholder` stands for an image, on a line of its own. Raises ValueError if
    the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], placeholder: str = "") -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._placeholder = placeholder
        self._takes_lists = self._takes([{"type": "text", "text": _PROBE}])
        self._takes_texts = not self._takes_lists or self._takes(_PROBE)

    def render(self, turns: Sequence[Turn], variables: Mapping[str, Any]) -> str:
        """The conversation as one text, ready for the assistant's answer.

        Raises InvalidRequest where the template refuses the conversation.
        """
        messages = [{"role": turn.role, "content": self._content(turn.content)} for turn in turns]
        try:
            return self._render(messages, variables)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest.of("chat.messages", f"the chat template refuses it: {error}") from error

    def _render(self, messages: Sequence[Mapping[str, _Content]], variables: Mapping[str, Any]) -> str:
        known = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        return self._template.render({**known, **variables, "messages": messages})

    def _takes(self, content: _Content) -> bool:
        """Whether this content comes out as what it says."""
        try:
            text = self._render([{"role": "user", "content": content}], {})
        except (jinja2.TemplateError, TypeError, ValueError):
            return False
        return _PROBE in text and not any(spilt in text for spilt in _SPILT)

    def _content(self, content: str | Sequence[str | ImagePart]) -> _Content:
        if isinstance(content, str):
            return content if self._takes_texts else [{"type": "text", "text": content}]
        if self._takes_lists:
            return [_part(part) for part in content]
        return "".join(f"{self._placeholder}\n" if isinstance(part, ImagePart) else part for part in content)


def _part(part: str | ImagePart) -> dict[str, str]:
    return {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part}
