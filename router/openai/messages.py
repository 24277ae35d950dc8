"""Conversations of OpenAI's API as ChatInput: texts, images, tools, calls and their results."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2, media_pb2
from router.openai.fields import Fields


class TextPart(Fields):
    """A text; `input_text` and `output_text` are its names in /v1/responses."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ImageUrl(Fields):
    """Where an image is: at an https: URL of an allowed host, or in a data: URL."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None  # every image is shown to the model as its processor shows it


class ImageUrlPart(Fields):
    """An image."""

    type: Literal["image_url"]
    image_url: ImageUrl


class InputImagePart(Fields):
    """An image in /v1/responses."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None


ContentPart = Annotated[TextPart | ImageUrlPart | InputImagePart, Field(discriminator="type")]


class FunctionCall(Fields):
    """What a call calls."""

    name: str
    arguments: str
    parsed_arguments: Any = None  # as `parsed` of a message


class PastToolCall(Fields):
    """A call in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # as the official packages' helpers join it from a stream


class ChatMessage(Fields):
    """One turn. What clients send back of an answer is accepted where it is empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[PastToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    parsed: Any = None  # what the official packages' helpers make of the content, and send back with it


class InputMessage(Fields):
    """A turn in /v1/responses. What clients send back of an earlier response is accepted."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    id: str | None = None
    status: str | None = None


class ReasoningText(Fields):
    """A part of a reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Fields):
    """The reasoning of an earlier response, as it was: before the turn that it belongs to."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    encrypted_content: None = None
    id: str | None = None
    status: str | None = None


def _kind(item: Any) -> str:
    """Which of the items it is. The type of a message may be left out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "Reasoning" if kind == "reasoning" else "Message"


# The names begin with capitals, since they are no fields in the paths of errors.
InputItem = Annotated[
    Annotated[ReasoningItem, Tag("Reasoning")] | Annotated[InputMessage, Tag("Message")], Discriminator(_kind)
]


class Function(Fields):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Fields):
    """A tool."""

    type: Literal["function"]
    function: Function


def add_messages(chat: generate_pb2.ChatInput, messages: list[ChatMessage]) -> None:
    """Adds the turns of a conversation."""
    for message in messages:
        # Chat templates of open models know no developer.
        role = "system" if message.role == "developer" else message.role
        turn = chat.messages.add(role=role)
        _add_content(turn, message.content)
        for call in message.tool_calls or []:
            turn.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)
        turn.tool_call_id = message.tool_call_id or ""
        turn.name = message.name or ""
        turn.reasoning = message.reasoning_content or ""


def turns_of(items: Sequence[ReasoningItem | InputMessage]) -> list[ChatMessage]:
    """The turns of a conversation, each with the reasoning before it."""
    turns: list[ChatMessage] = []
    reasoning = ""
    for one in items:
        if isinstance(one, ReasoningItem):
            reasoning += "".join(each.text for each in one.content or [])
        else:
            turns.append(ChatMessage(role=one.role, content=one.content, reasoning_content=reasoning or None))
            reasoning = ""
    return turns


def add_tools(chat: generate_pb2.ChatInput, tools: list[FunctionTool]) -> None:
    """Adds the tools. Raises InvalidRequest."""
    for index, tool in enumerate(tools):
        function = tool.function
        try:
            parameters = json.dumps(function.parameters, ensure_ascii=False) if function.parameters is not None else ""
        except RecursionError:
            raise InvalidRequest.of(f"tools[{index}].function.parameters", "is nested too deeply") from None
        chat.tools.add(name=function.name, description=function.description or "", parameters=parameters)
        chat.tools[-1].is_strict = bool(function.strict)


def _add_content(turn: generate_pb2.ChatMessage, content: "str | list[Any] | None") -> None:
    if content is None:
        return
    if isinstance(content, str):
        turn.parts.add(text=content)
        return
    for part in content:
        match part:
            case TextPart():
                turn.parts.add(text=part.text)
            case ImageUrlPart():
                _set_image(turn.parts.add().media, part.image_url.url)
            case InputImagePart():
                _set_image(turn.parts.add().media, part.image_url)


def _set_image(item: media_pb2.MediaItem, url: str) -> None:
    """Sets it in place: a message as an argument would be copied, and a URL may hold megabytes."""
    item.uri = url
    item.modality = media_pb2.MODALITY_IMAGE
