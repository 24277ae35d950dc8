"""Conversations of OpenAI's API as ChatInput: texts, images, tools, calls and their results."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from baton.inference.v1 import generate_pb2, media_pb2
from router.openai.errors import TurnPlace
from router.openai.fields import Fields, json_text, refuse


class TextPart(Fields):
    """A text; `input_text` and `output_text` are its names in /v1/responses."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ImageUrl(Fields):
    """An image's location: an https: URL of an allowed host, or a data: URL."""

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
    """The function of a tool call, and its arguments."""

    name: str
    arguments: str
    parsed_arguments: Any = None  # as `parsed` of a message
    provider_specific_fields: Any = None  # as of a message


class PastToolCall(Fields):
    """A call in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # as the official packages' helpers join it from a stream
    provider_specific_fields: Any = None  # as of a message


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
    provider_specific_fields: Any = None  # what LiteLLM adds to an answer, and sends back with it


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


class FunctionCallItem(FunctionCall):
    """A call of an earlier response."""

    type: Literal["function_call"]
    call_id: str
    id: str | None = None
    status: str | None = None


class FunctionCallOutput(Fields):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ContentPart]
    id: str | None = None
    status: str | None = None


class ItemReference(Fields):
    """An item by its id. It is refused, since nothing is stored."""

    type: Literal["item_reference"]
    id: str


_NO_STORE = (
    "no item is stored here, so none can be referred to: send the items themselves, which clients do when they are "
    "told store: false (Vercel AI SDK: providerOptions: {openai: {store: false}})"
)

# The names begin with capitals, since they are no fields in the paths of errors.
_ITEM_NAMES: Mapping[Any, str] = {
    "reasoning": "Reasoning",
    "function_call": "FunctionCall",
    "function_call_output": "FunctionCallOutput",
    "item_reference": "ItemReference",
}


def _kind(item: Any) -> str:
    """Which of the items it is. The type of a message may be left out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return _ITEM_NAMES.get(kind, "Message") if isinstance(kind, str) else "Message"


InputItem: TypeAlias = Annotated[
    Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[FunctionCallItem, Tag("FunctionCall")]
    | Annotated[FunctionCallOutput, Tag("FunctionCallOutput")]
    | Annotated[ItemReference, Tag("ItemReference")]
    | Annotated[InputMessage, Tag("Message")],
    Discriminator(_kind),
]


class Function(Fields):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool: a function."""

    type: Literal["function"]


class FunctionTool(Tool):
    """A tool."""

    function: Function


class FlatFunctionTool(Function, Tool):
    """A tool in /v1/responses, where the function is beside the type."""


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


def add_items(chat: generate_pb2.ChatInput, items: Sequence[InputItem]) -> None:
    """Adds the turns of a conversation in /v1/responses, each with the reasoning before it. Raises Unsupported.

    Calls belong to the assistant's message before them.
    """
    reasoning = ""
    for index, one in enumerate(items):
        match one:
            case ReasoningItem():
                reasoning += "".join(each.text for each in one.content or [])
                continue
            case FunctionCallItem():
                if reasoning or not chat.messages or chat.messages[-1].role != "assistant":
                    chat.messages.add(role="assistant", reasoning=reasoning)
                chat.messages[-1].tool_calls.add(id=one.call_id, name=one.name, arguments=one.arguments)
            case FunctionCallOutput():
                add_messages(chat, [ChatMessage(role="tool", content=one.output, tool_call_id=one.call_id)])
            case ItemReference():
                raise refuse(f"input[{index}].id", _NO_STORE)
            case InputMessage():
                turn = ChatMessage(role=one.role, content=one.content, reasoning_content=reasoning or None)
                add_messages(chat, [turn])
        reasoning = ""


def turns_of(items: Sequence[InputItem]) -> Sequence[TurnPlace]:
    """The places of the turns that `add_items` adds."""
    turns: list[TurnPlace] = []
    may_go_on = False  # with a call
    for index, one in enumerate(items):
        match one:
            case FunctionCallItem() if may_go_on:
                continue
            case ReasoningItem():
                may_go_on = may_go_on and not any(each.text for each in one.content or [])
                continue
            case FunctionCallItem():
                turns.append(TurnPlace(index, index))
            case FunctionCallOutput():
                turns.append(TurnPlace(index, index, "output"))
            case _:
                turns.append(TurnPlace(index, index + 1))
        may_go_on = isinstance(one, FunctionCallItem) or (isinstance(one, InputMessage) and one.role == "assistant")
    return turns


def add_tools(chat: generate_pb2.ChatInput, functions: Sequence[Function], within: str) -> None:
    """Adds the tools. `within` is where a tool has its function, for errors. Raises InvalidRequest."""
    for index, function in enumerate(functions):
        parameters = ""
        if function.parameters is not None:
            parameters = json_text(function.parameters, f"tools[{index}].{within}parameters")
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
