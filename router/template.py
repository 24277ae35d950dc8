"""Renders a model's chat template as Hugging Face transformers does, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rpc.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation, as a template sees it."""

    role: str
    content: str


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

    Raises ValueError if the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, turns: Sequence[Turn], variables: Mapping[str, Any]) -> str:
        """The conversation as one text, ready for the assistant's answer.

        Raises InvalidRequest where the template refuses the conversation.
        """
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        known = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render({**known, **variables, "messages": messages})
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest.of("chat.messages", f"the chat template refuses it: {error}") from error
