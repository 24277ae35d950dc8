"""Which format a model's tool calls have, and the parser for one answer."""

import string
from collections.abc import Collection, Sequence
from functools import cache
from hashlib import blake2b
from importlib.metadata import entry_points

import structlog

from baton.inference.v1 import generate_pb2
from router.text.parsing.formats import DEEPSEEK, HERMES, LLAMA, MISTRAL, ToolFormat
from router.text.parsing.parts import (
    BEGIN,
    END,
    BrokenCall,
    CallPiece,
    Parser,
    Part,
    Reasoning,
    ReasoningParser,
    Text,
    ToolCall,
)

log = structlog.get_logger(__name__)

GROUP = "baton.tool_formats"
_BUILT_IN = (HERMES, MISTRAL, DEEPSEEK, LLAMA)
_ID_CHARACTERS = string.ascii_letters + string.digits


@cache
def tool_formats() -> tuple[ToolFormat, ...]:
    """All formats: those of other distributions, by the entry points `baton.tool_formats`, before the built-in ones.

    An entry point that cannot be loaded is left out, and logged.
    """
    found: list[ToolFormat] = []
    for entry in entry_points(group=GROUP):
        try:
            loaded = entry.load()
        except (ImportError, AttributeError) as error:
            log.error("cannot load a tool format", entry_point=entry.name, error=str(error))
            continue
        if isinstance(loaded, ToolFormat):
            found.append(loaded)
        else:
            log.error("entry point is not a ToolFormat", entry_point=entry.name)
    return (*found, *_BUILT_IN)


def format_of(chat_template: str) -> ToolFormat | None:
    """The format of a model with this chat template; None if it has none that is known."""
    return next((one for one in tool_formats() if any(sign in chat_template for sign in one.signs)), None)


class AnswerParser:
    """Divides one answer into text, reasoning and tool calls. With `is_single` its first call ends it. With `grows`
    calls are also given while they are written, if the format allows it.

    The ids of its tool calls follow from `call_id`, so that an answer that is read once more has the same ones.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolFormat | None,
        names: Collection[str],
        *,
        call_id: str,
        is_single: bool = False,
        grows: bool = False,
    ) -> None:
        self.has_ended = False
        self._call_id = call_id
        self._count = 0
        self._is_single = is_single
        self._reasoning = reasoning
        self._format = tools
        opened = tools and (tools.open_growing if grows and tools.open_growing else tools.open)
        self._tools: Parser | None = opened(names) if opened else None
        self._has_begun = False  # the call that is counted next
        # Special tokens that the text must contain to be parsed.
        self.markers = (*(tools.markers if tools else ()), *((BEGIN, END) if reasoning else ()))

    def push(self, text: str) -> "Parsed":
        """The parts that are certain with this text."""
        parts = self._reasoning.push(text) if self._reasoning else [Text(text, text)]
        return self._parsed(parts)

    def flush(self) -> "Parsed":
        """The parts that were held back."""
        parsed = self._parsed(self._reasoning.flush() if self._reasoning else ())
        if self._tools:
            for part in self._tools.flush():
                self._add(part, parsed)
        return parsed

    def _parsed(self, parts: Sequence[Part]) -> "Parsed":
        parsed = Parsed()
        for part in parts:
            if isinstance(part, Text) and self._tools:
                for inner in self._tools.push(part.text):
                    self._add(inner, parsed)
            else:
                self._add(part, parsed)
        return parsed

    def _add(self, part: Part, parsed: "Parsed") -> None:
        if self.has_ended:
            return
        match part:
            case Text():
                parsed.text += part.text
            case Reasoning():
                parsed.reasoning += part.text
            case CallPiece():
                delta = generate_pb2.ToolCallDelta(index=self._count, arguments=part.arguments)
                if not self._has_begun:
                    delta.id, delta.name, self._has_begun = self._identity, part.name, True
                parsed.call_deltas.append(delta)
            case BrokenCall():
                self._count += 1  # a client that has its beginning takes the next call for another one
                self._has_begun = False
            case ToolCall():
                call = generate_pb2.ToolCall(id=self._identity, name=part.name, arguments=part.arguments)
                self._count += 1
                self._has_begun = False
                parsed.tool_calls.append(call)
                self.has_ended = self._is_single

    @property
    def _identity(self) -> str:
        """The id of the next call."""
        assert self._format is not None
        return _id_of(self._format, self._call_id, self._count)


class Parsed:
    """Pieces of an answer, each kind by itself."""

    __slots__ = ("call_deltas", "reasoning", "text", "tool_calls")

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.tool_calls: list[generate_pb2.ToolCall] = []
        self.call_deltas: list[generate_pb2.ToolCallDelta] = []


def _id_of(tools: ToolFormat, call_id: str, ordinal: int) -> str:
    """The id of one call of an answer, which only those know that know the answer's own id."""
    number = int.from_bytes(blake2b(f"{call_id}/{ordinal}".encode()).digest(), "big")
    characters = []
    for _ in range(tools.id_length):
        number, digit = divmod(number, len(_ID_CHARACTERS))
        characters.append(_ID_CHARACTERS[digit])
    return tools.id_prefix + "".join(characters)
