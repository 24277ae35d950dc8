"""Tool choice and strict tools, as the grammar of an answer in the model's own format of calls."""

import re

from baton.errors import FieldViolation, InvalidRequest, Unsupported
from baton.inference.v1 import generate_pb2
from router.text.parsing.formats import ToolFormat

_TAG_SCHEMA = re.compile(r"^guided\.structural_tags\.tags\[(\d+)\]\.json_schema")


def wants_guided_calls(chat: generate_pb2.ChatInput) -> bool:
    """Whether calls must be made, or must follow their schema."""
    choice = chat.tool_choice
    return choice.is_required or bool(choice.name) or any(tool.is_strict for tool in chat.tools)


def guided_calls(chat: generate_pb2.ChatInput, tools: ToolFormat | None) -> generate_pb2.GuidedDecoding:
    """The grammar of an answer to this chat. Raises InvalidRequest and Unsupported."""
    if not chat.tools:
        raise InvalidRequest.of("chat.tool_choice", "needs tools to choose from")
    if tools is None or tools.frame is None:
        raise Unsupported("chat.tool_choice, chat.tools.is_strict: this model's calls cannot be guided")
    made = generate_pb2.GuidedDecoding()
    made.structural_tags.is_required = chat.tool_choice.is_required or bool(chat.tool_choice.name)
    for _, tool in _offered(chat):
        begin, end = tools.frame(tool.name)
        # Also of tools that are not strict: where one call is guided, all are.
        schema = tool.parameters if tool.is_strict or made.structural_tags.is_required else ""
        made.structural_tags.tags.add(begin=begin, json_schema=schema, end=end, trigger=tools.trigger)
    return made


def name_tools(error: InvalidRequest, chat: generate_pb2.ChatInput) -> InvalidRequest:
    """The error of a schema in `guided_calls`, by the field of the tool that it is of."""
    places = [index for index, _ in _offered(chat)]

    def renamed(field: str) -> str:
        return _TAG_SCHEMA.sub(lambda found: f"chat.tools[{places[int(found[1])]}].parameters", field)

    return InvalidRequest([FieldViolation(renamed(one.field), one.description) for one in error.violations])


def _offered(chat: generate_pb2.ChatInput) -> list[tuple[int, generate_pb2.Tool]]:
    """The tools that may be called, with their indices. Raises InvalidRequest if there is no such tool."""
    name = chat.tool_choice.name
    found = [(index, tool) for index, tool in enumerate(chat.tools) if not name or tool.name == name]
    if not found:
        raise InvalidRequest.of("chat.tool_choice.name", f"no tool is called {name!r}")
    return found
