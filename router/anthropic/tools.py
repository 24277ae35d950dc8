"""Tools of Anthropic's API: functions of the client's own, and the choice of them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from baton.inference.v1 import generate_pb2
from router.anthropic.content import Block
from router.openai.fields import Fields, OnlyFalse, json_text


class ClientTool(Block):
    """A tool that the client runs. The last fields say how others run tools, or see them later: nothing here does."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None
    defer_loading: OnlyFalse | None = None


class AutoChoice(Fields):
    """The model chooses."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool = False


class AnyChoice(Fields):
    """One of the tools must be called."""

    type: Literal["any"]
    disable_parallel_tool_use: bool = False


class NamedChoice(Fields):
    """This tool must be called."""

    type: Literal["tool"]
    name: Annotated[str, Field(min_length=1)]
    disable_parallel_tool_use: bool = False


class NoChoice(Fields):
    """None may be called."""

    type: Literal["none"]


ToolChoice: TypeAlias = Annotated[AutoChoice | AnyChoice | NamedChoice | NoChoice, Field(discriminator="type")]


def offer_tools(chat: generate_pb2.ChatInput, tools: Sequence[ClientTool], choice: ToolChoice | None) -> None:
    """Adds the tools that may be called. Raises InvalidRequest."""
    if isinstance(choice, NoChoice):
        return
    for index, tool in enumerate(tools):
        schema = json_text(tool.input_schema, f"tools[{index}].input_schema")
        chat.tools.add(
            name=tool.name, description=tool.description or "", parameters=schema, is_strict=bool(tool.strict)
        )
    match choice:
        case AnyChoice():
            chat.tool_choice.is_required = True
        case NamedChoice():
            chat.tool_choice.name = choice.name
    if choice is not None and choice.disable_parallel_tool_use and chat.tools:
        chat.tool_choice.is_single = True
