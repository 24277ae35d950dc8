"""Blocks of content of Anthropic's API, and the conversation that they make.

A turn of its API may be several of ChatInput: results of tools are turns of their own there. Turns of one role that
follow one another are one turn, as Anthropic has it.

`cache_control`: up to four marks, each at the end of a part to retain. The last one covers all before it.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2, media_pb2
from router.openai.fields import Fields, json_text

_MOST_MARKS: Final = 4
_SECONDS: Final = {"5m": 300, "1h": 3600}


class CacheControl(Fields):
    """A mark: retain the prompt up to here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class CacheMarks:
    """The marks of a body, in its order. The longest ttl is that of all."""

    def __init__(self) -> None:
        self._count = 0
        self._seconds = 0
        self._end = generate_pb2.ChatPosition()

    def add(self, place: str, mark: CacheControl | None, chat: generate_pb2.ChatInput) -> None:
        """Notes the mark of the block at `place`, if it has one: here the chat ends with it. That of the body is at "".

        Raises InvalidRequest for a fifth mark.
        """
        if mark is None:
            return
        self._count += 1
        if self._count > _MOST_MARKS:
            field = f"{place}.cache_control" if place else "cache_control"
            raise InvalidRequest.of(field, f"is mark {self._count} of at most {_MOST_MARKS}")
        self._seconds = max(self._seconds, _SECONDS[mark.ttl])
        turns = chat.messages
        self._end = generate_pb2.ChatPosition(messages=len(turns), parts=len(turns[-1].parts) if turns else 0)

    def set_in(self, request: generate_pb2.GenerateRequest) -> None:
        """Asks for what is marked to be retained."""
        if self._count:
            request.cache.retain.ttl.FromSeconds(self._seconds)
            request.cache.retain.chat.CopyFrom(self._end)


_FAILED = "Error: "  # before the result of a call that failed: templates have no other place for it


class Block(Fields):
    """A block: any of them may have a mark."""

    cache_control: CacheControl | None = None


class TextBlock(Block):
    """A text."""

    type: Literal["text"]
    text: str
    citations: None = None


class Base64Source(Fields):
    """An image in the body."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    @property
    def uri(self) -> str:
        """The same as a data: URL."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Fields):
    """An image at an https: URL of an allowed host."""

    type: Literal["url"]
    url: str

    @property
    def uri(self) -> str:
        """The URL."""
        return self.url


class ImageBlock(Block):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class ThinkingBlock(Fields):
    """Reasoning of an earlier turn. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class DirectCaller(Fields):
    """The model itself."""

    type: Literal["direct"]


class ToolUseBlock(Block):
    """A call of an earlier turn. The last fields are those of the official packages' objects, sent back as they are."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] = ""
    is_error: bool = False


ContentBlock: TypeAlias = TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
AnyBlock: TypeAlias = Annotated[ContentBlock, Field(discriminator="type")]


class InputTurn(Fields):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | list[AnyBlock]


class Conversation:
    """A ChatInput that grows by turns of Anthropic's API.

    `places` are where the body has each turn and part, for errors. Marks of its blocks go to `marks`. `set_reasoning`
    comes last.
    """

    def __init__(self, chat: generate_pb2.ChatInput, marks: CacheMarks) -> None:
        self._chat = chat
        self._marks = marks
        self.places: dict[str, str] = {}
        self._thoughts: dict[int, list[str]] = {}  # by turn

    def add_system(self, system: "str | Sequence[TextBlock]") -> None:
        """Adds the instructions."""
        if system:
            self._add(
                "system", "system", [("system", system)] if isinstance(system, str) else _placed("system", system)
            )

    def add(self, index: int, message: InputTurn) -> None:
        """Adds the turn at this index of the body."""
        place = f"messages[{index}]"
        if isinstance(message.content, str):
            self._add(message.role, place, [(f"{place}.content", message.content)])
        else:
            self._add(message.role, place, _placed(f"{place}.content", message.content))

    def _add(self, role: str, place: str, blocks: "Sequence[tuple[str, str | ContentBlock]]") -> None:
        turn: generate_pb2.ChatMessage | None = None
        for where, block in blocks:
            if isinstance(block, ToolResultBlock):
                self._add_result(where, block)
                turn = None
                continue
            turn = turn or self._turn(role, place)
            if isinstance(block, ThinkingBlock):
                self._thoughts.setdefault(len(self._chat.messages) - 1, []).append(block.thinking)
            else:
                self._add_block(turn, where, block)
        if not blocks:
            self._turn(role, place)

    def set_reasoning(self) -> None:
        """Sets the reasoning of all turns. A message keeps the memory of each value that a field of it has had."""
        for index, thoughts in self._thoughts.items():
            self._chat.messages[index].reasoning = "".join(thoughts)

    def _turn(self, role: str, place: str) -> generate_pb2.ChatMessage:
        """The last turn if it is of this role, or a new one."""
        turns = self._chat.messages
        if not turns or turns[-1].role != role:
            self.places[f"chat.messages[{len(turns)}]"] = place
            return turns.add(role=role)
        return turns[-1]

    def _add_result(self, place: str, block: ToolResultBlock) -> None:
        turns = self._chat.messages
        self.places[f"chat.messages[{len(turns)}]"] = place
        turn = turns.add(role="tool", tool_call_id=block.tool_use_id)
        if block.is_error:
            turn.parts.add(text=_FAILED)
        if isinstance(block.content, str):
            self._add_block(turn, f"{place}.content", block.content)
        else:
            for where, inner in _placed(f"{place}.content", block.content):
                self._add_block(turn, where, inner)
        if not turn.parts:
            turn.parts.add(text="")
        self._marks.add(place, block.cache_control, self._chat)

    def _add_block(self, turn: generate_pb2.ChatMessage, place: str, block: "str | ContentBlock") -> None:
        field = f"chat.messages[{len(self._chat.messages) - 1}]"
        if isinstance(block, ToolUseBlock):
            self.places[f"{field}.tool_calls[{len(turn.tool_calls)}]"] = place
            arguments = json_text(block.input, f"{place}.input")
            turn.tool_calls.add(id=block.id, name=block.name, arguments=arguments)
            self._marks.add(place, block.cache_control, self._chat)
            return
        self.places[f"{field}.parts[{len(turn.parts)}]"] = place
        match block:
            case str():
                turn.parts.add(text=block)
            case TextBlock():
                turn.parts.add(text=block.text)
            case ImageBlock():
                # Set in place: a message as an argument would be copied, and a URL may hold megabytes.
                media = turn.parts.add().media
                media.uri = block.source.uri
                media.modality = media_pb2.MODALITY_IMAGE
        if isinstance(block, Block):
            self._marks.add(place, block.cache_control, self._chat)


def _placed(field: str, blocks: "Sequence[ContentBlock]") -> list[tuple[str, "str | ContentBlock"]]:
    return [(f"{field}[{index}]", block) for index, block in enumerate(blocks)]
