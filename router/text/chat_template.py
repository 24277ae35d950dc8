"""Renders a model's chat template as Hugging Face transformers does, in a sandbox."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn, TypeAlias, TypeVar

import jinja2
from jinja2 import meta, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Assign, AssignBlock, Filter, For, Node, Template
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import InvalidRequest
from runtime.clock import thread_time, wall_time


@dataclass(frozen=True, slots=True)
class ImagePart:
    """The place of an image in a message."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation: its text, or, if there are images in it, its parts."""

    role: str
    content: str | Sequence[str | ImagePart]
    more: Mapping[str, Any] = field(default_factory=dict)  # tool_calls, tool_call_id, name, reasoning_content


# A message's content as templates get it: a text, or a list of objects with a `type`.
_Content: TypeAlias = str | list[dict[str, str]]

# Errors of a template that refuses a conversation, and of one that is wrong.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError)
_FAILURES = (*_REFUSALS, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError)

Value = TypeVar("Value")

_PROBE = "a_word_that_no_template_has"
# The CPU time that one rendering may take. An ordinary one takes 0.02 ms, of 1,000 messages 1 ms. A thread shares the
# interpreter with the event loop, so a rendering there delays it too, by up to 5 ms at a time.
LOOP_SECONDS = 0.002
LONGEST_SECONDS = 0.25
_BUDGET = "budget of this rendering"  # a variable that no template can name
_LONGEST_PRODUCT = 100_000  # of a text or list by a number
_LONGEST_TEXT = 16 * 1024 * 1024  # in characters, of a variable or an argument
_LARGEST_IN_POWER = 1000
_SPILT = ("'type': 'text'", '"type": "text"')  # a list that was rendered as text


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's text for training, renders as its content."""

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
    return datetime.fromtimestamp(wall_time()).strftime(format)


class SlowTemplate(Exception):
    """A rendering took longer than it was given."""


class _Budget:
    """The CPU time of this thread that one rendering may take."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = thread_time() + seconds

    def check(self) -> None:
        """Raises SlowTemplate if it is used up."""
        if thread_time() > self._ends_at:
            raise SlowTemplate(f"it takes longer than {self._seconds:g} s")


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that bounds the time of a rendering, and the size of products, powers and of texts that it keeps.

    The time is checked at each pass of a loop, call and assignment, so recursive macros are bounded too. A single
    filter, or method of a text, is not interrupted.
    """

    intercepted_binops = frozenset(("*", "**"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(For):
            loop.iter = Filter(loop.iter, "_bounded", [], [], None, None)
        for assignment in tree.find_all(Assign):
            assignment.node = Filter(assignment.node, "_kept", [], [], None, None)
        for block in tree.find_all(AssignBlock):
            block.filter = Filter(block.filter, "_kept", [], [], None, None)
        tree.set_environment(self)
        return tree

    def call(self, context: Context, function: Any, /, *arguments: Any, **options: Any) -> Any:
        for argument in arguments:
            _require_short(argument)
        context[_BUDGET].check()
        return super().call(context, function, *arguments, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            lengths = [len(one) for one in (left, right) if isinstance(one, Sized)]
            factors = [one for one in (left, right) if isinstance(one, int)]
            is_small = not lengths or all(lengths[0] * factor <= _LONGEST_PRODUCT for factor in factors)
        else:
            is_small = all(isinstance(one, float) or abs(one) <= _LARGEST_IN_POWER for one in (left, right))
        if not is_small:
            raise SecurityError(f"a result of {operator} is too large for a template")
        return super().call_binop(context, operator, left, right)


@pass_context
def _bounded(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    budget = context[_BUDGET]
    for item in items:
        budget.check()
        yield item


@pass_context
def _kept(context: Context, value: Value) -> Value:
    context[_BUDGET].check()
    _require_short(value)
    return value


def _require_short(value: Any) -> None:
    # Otherwise a text that is doubled a few times would fill the memory.
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        raise SecurityError("a text is too long for a template")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.filters["_bounded"] = _bounded
    environment.filters["_kept"] = _kept
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template. `special_tokens` are variables such as bos_token.

    Templates take a message's content as a text, as a list of parts, or both; each gets what it takes. For a template
    that takes texts only, `placeholder` on a line of its own stands for an image. Raises ValueError if the template is
    not valid Jinja, or fails on the simplest conversation instead of rendering or refusing it.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], placeholder: str = "") -> None:
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except _FAILURES as error:
            raise ValueError(f"the chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._placeholder = placeholder
        self._takes_lists = self._accepts([{"type": "text", "text": _PROBE}])
        self._takes_texts = not self._takes_lists or self._accepts(_PROBE)
        if not self._takes_lists:
            self._require_a_working_one()

    def render(
        self,
        turns: Sequence[Turn],
        variables: Mapping[str, Any],
        seconds: float = LONGEST_SECONDS,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The conversation as one text that ends where the assistant's answer begins.

        `tools` are objects with the keys `type` and `function`. Raises InvalidRequest if the template refuses the
        conversation, or takes longer than LONGEST_SECONDS of CPU time. With fewer `seconds`, raises SlowTemplate once
        they have passed: render it in a thread.
        """
        messages = [{"role": turn.role, "content": self._content(turn.content), **turn.more} for turn in turns]
        try:
            return self._render(messages, {**variables, "tools": list(tools) or None}, seconds)
        except SlowTemplate as error:
            if seconds < LONGEST_SECONDS:
                raise
            raise _refused(error) from error
        except _FAILURES as error:
            raise _refused(error) from error

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        seconds: float = LONGEST_SECONDS,
    ) -> str:
        known = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        return self._template.render({**known, **variables, "messages": messages, _BUDGET: _Budget(seconds)})

    def _require_a_working_one(self) -> None:
        try:
            self._render([{"role": "user", "content": _PROBE}], {})
        except (*_REFUSALS, SlowTemplate):
            return
        except _FAILURES as error:
            raise ValueError(f"the chat template fails: {type(error).__name__}: {error}") from error

    def _accepts(self, content: _Content) -> bool:
        """True if the template renders this content as its text."""
        try:
            text = self._render([{"role": "user", "content": content}], {})
        except (*_FAILURES, SlowTemplate):
            return False
        return _PROBE in text and not any(spilt in text for spilt in _SPILT)

    def _content(self, content: str | Sequence[str | ImagePart]) -> _Content:
        if isinstance(content, str):
            return content if self._takes_texts else [{"type": "text", "text": content}]
        if self._takes_lists:
            return [
                {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part} for part in content
            ]
        return "".join(f"{self._placeholder}\n" if isinstance(part, ImagePart) else part for part in content)


def _refused(error: Exception) -> InvalidRequest:
    return InvalidRequest.of("chat.messages", f"the chat template refuses it: {error}")
