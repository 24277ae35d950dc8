"""The constraint that guided decoding follows, as a value that can be the key of a cache."""

import enum
import json
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2

MAX_TEXT_BYTES = 128 * 1024
MAX_CHOICES = 1000
MAX_TAGS = 128


class GuideKind(enum.Enum):
    """The alternatives of the message GuidedDecoding, by their fields' names."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"
    STRUCTURAL_TAGS = "structural_tags"


@dataclass(frozen=True, slots=True)
class Tag:
    """A part of an answer that follows a schema. See StructuralTag in the API."""

    begin: str
    schema: str
    end: str
    trigger: str


@dataclass(frozen=True, slots=True)
class Guide:
    """A grammar for a whole answer. `text` is empty for choices and tags, which are in `choices` and `tags`."""

    kind: GuideKind
    text: str = ""
    choices: tuple[str, ...] = ()
    tags: tuple[Tag, ...] = ()
    needs_tag: bool = False

    @property
    def field(self) -> str:
        """The path of its field in a request."""
        return f"guided.{self.kind.value}"


def read_guide(message: generate_pb2.GuidedDecoding) -> Guide:
    """Returns the guide of a message. Raises InvalidRequest if it has none, or one that is too large to look at."""
    which = message.WhichOneof("guide")
    if which is None:
        raise InvalidRequest.of("guided", "is empty; give one of json_schema, regex, grammar, choice, structural_tags")
    if message.ByteSize() > MAX_TEXT_BYTES:
        raise InvalidRequest.of(f"guided.{which}", f"has {message.ByteSize()} bytes of at most {MAX_TEXT_BYTES}")
    kind = GuideKind(which)
    match kind:
        case GuideKind.CHOICE:
            _bound("guided.choice.texts", len(message.choice.texts), MAX_CHOICES)
            return Guide(kind, choices=tuple(message.choice.texts))
        case GuideKind.STRUCTURAL_TAGS:
            _bound("guided.structural_tags.tags", len(message.structural_tags.tags), MAX_TAGS)
            tags = message.structural_tags
            found = (Tag(one.begin, one.json_schema, one.end, one.trigger or one.begin) for one in tags.tags)
            return Guide(kind, tags=tuple(found), needs_tag=tags.is_required)
        case _:
            return Guide(kind, text=getattr(message, which))


def json_text(text: str) -> str:
    """A text as JSON, whose escapes are those of Lark's strings too."""
    return json.dumps(text, ensure_ascii=False)


def _bound(field: str, number: int, most: int) -> None:
    if not 1 <= number <= most:
        raise InvalidRequest.of(field, f"has {number} items; it must have 1 to {most}")
