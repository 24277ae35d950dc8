"""Tool choice and strict tools, as the grammar of an answer in the model's own format of calls."""

import json
import re

from baton.errors import FieldViolation, InvalidRequest, Unsupported
from baton.inference.v1 import generate_pb2
from grammars.guide import MAX_TEXT_BYTES
from router.text.parsing.formats import ToolFormat

_NO_ARGUMENTS = '{"type": "object", "additionalProperties": false}'
_ANY_ARGUMENTS = '{"type": "object"}'
_ALL_TAGS = "guided.structural_tags"
_TAG_SCHEMA = re.compile(r"^guided\.structural_tags\.tags\[(\d+)\]\.json_schema")


def wants_guided_calls(chat: generate_pb2.ChatInput) -> bool:
    """True if calls must be made, or must follow their schema."""
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
    for index, tool in _offered(chat):
        begin, end = tools.frame(tool.name)
        # Also of tools that are not strict: where one call is guided, all are.
        is_followed = tool.is_strict or made.structural_tags.is_required
        schema = _object_schema(tool.parameters, f"chat.tools[{index}].parameters") if is_followed else ""
        made.structural_tags.tags.add(begin=begin, json_schema=schema, end=end, trigger=tools.trigger)
    return made


def _object_schema(parameters: str, path: str) -> str:
    """The schema of a call's arguments, which are always an object. Raises InvalidRequest for another type.

    What is no schema at all is returned as it is, since its reader names all that is wrong with it.
    """
    if not parameters:
        return _NO_ARGUMENTS
    if len(parameters) > MAX_TEXT_BYTES:
        return parameters
    try:
        schema = json.loads(parameters)
    except (ValueError, RecursionError):
        return parameters
    if schema is True:
        return _ANY_ARGUMENTS
    if not isinstance(schema, dict):
        raise InvalidRequest.of(path, "must be the schema of an object")
    if "type" not in schema:
        # In the text, so that its reader still sees keys that are given twice.
        rest = parameters.strip()[1:]
        return f"{_ANY_ARGUMENTS[:-1]}{', ' if schema else ''}{rest}"
    given = schema["type"]
    if given == "object":
        return parameters
    if isinstance(given, list) and "object" in given:
        return json.dumps({**schema, "type": "object"}, ensure_ascii=False)
    raise InvalidRequest.of(f"{path}.type", 'must be "object": the arguments of a call are an object')


def name_tools(error: InvalidRequest, chat: generate_pb2.ChatInput) -> InvalidRequest:
    """The error of a schema in `guided_calls`, by the field of the tool that it is of."""
    places = [index for index, _ in _offered(chat)]

    def renamed(field: str) -> str:
        if field == _ALL_TAGS:
            return f"chat.tools[{places[0]}].parameters" if len(places) == 1 else "chat.tools"
        return _TAG_SCHEMA.sub(lambda found: f"chat.tools[{places[int(found[1])]}].parameters", field)

    return InvalidRequest([FieldViolation(renamed(one.field), one.description) for one in error.violations])


def _offered(chat: generate_pb2.ChatInput) -> list[tuple[int, generate_pb2.Tool]]:
    """The tools that may be called, with their indices. Raises InvalidRequest if there is no such tool."""
    name = chat.tool_choice.name
    found = [(index, tool) for index, tool in enumerate(chat.tools) if not name or tool.name == name]
    if not found:
        raise InvalidRequest.of("chat.tool_choice.name", f"no tool is called {name!r}")
    return found
