"""Conversations: their checks, and from them to token ids by the model's chat template."""

import json
import math
import re
from collections.abc import Iterator

from google.protobuf import json_format, struct_pb2

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2
from router.config import LimitsConfig
from router.text import media_validation as media
from router.text.chat_template import LONGEST_SECONDS, ImagePart, Turn
from router.text.json_values import WrongValue, load_json
from router.text.served_model import ServedModel
from rpc.violations import Violations

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_NAME_RULE = "must be 1 to 64 letters, digits, or any of _ . -"
_RESERVED_VARIABLES = ("messages", "tools", "documents")


def encode(
    chat: generate_pb2.ChatInput, model: ServedModel, template_seconds: float = LONGEST_SECONDS, salt: str = ""
) -> tuple[list[int], str]:
    """The ids of a conversation, and the text that the template renders. Raises as `tokenize`."""
    tokenizer = model.text_tokenizer
    turns = [_turn(message) for message in chat.messages]
    tools = [_tool(tool) for tool in chat.tools]
    text = tokenizer.render(turns, _template_variables(chat), template_seconds, tools)
    violations = Violations()
    model.check_length("chat.messages", len(text), violations)
    violations.raise_any()
    return tokenizer.encode_chat(text, salt), text


def bound(chat: generate_pb2.ChatInput, limits: LimitsConfig, violations: Violations) -> None:
    """Notes a conversation with too many messages or parts."""
    if violations.count("chat.messages", len(chat.messages), limits.max_messages):
        parts = sum(len(message.parts) for message in chat.messages)
        parts += sum(len(message.tool_calls) for message in chat.messages)
        violations.count("chat.messages.parts", parts, limits.max_message_parts)
    violations.count("chat.tools", len(chat.tools), limits.max_tools)


def check(chat: generate_pb2.ChatInput, model: ServedModel, violations: Violations) -> None:
    """Notes the wrong fields of a conversation of bounded size."""
    violations.require(bool(chat.messages), "chat.messages", "is empty")
    length = 0
    for index, message in enumerate(chat.messages):
        length += _check_message(f"chat.messages[{index}]", message, violations)
        if violations.is_full:
            return
    places: dict[str, int] = {}
    for index, tool in enumerate(chat.tools):
        length += len(tool.description) + len(tool.parameters)
        violations.require(bool(_NAME.fullmatch(tool.name)), f"chat.tools[{index}].name", _NAME_RULE)
        first = places.setdefault(tool.name, index)
        violations.require(first == index, f"chat.tools[{index}].name", f"is that of tool {first}, too")
        if tool.parameters:
            _check_object(f"chat.tools[{index}].parameters", tool.parameters, violations)
    model.check_length("chat.messages", length, violations)
    for name in _RESERVED_VARIABLES:
        reserved = name in chat.template_variables.fields
        violations.require(not reserved, f"chat.template_variables.{name}", "is reserved for the template")


def require(chat: generate_pb2.ChatInput, model: ServedModel) -> None:
    """Raises Unsupported if the model takes no conversations, or none with media."""
    if not model.can_chat:
        raise model.unsupported("chat")
    if chat.tools and not model.capabilities.tools:
        raise model.unsupported("tools")
    if media.has_media(chat.messages) and not model.capabilities.modalities:
        raise model.unsupported("media")


def _check_message(path: str, message: generate_pb2.ChatMessage, violations: Violations) -> int:
    """Notes the wrong fields of a message. Returns its length in characters."""
    violations.require(bool(message.role), f"{path}.role", "is empty")
    violations.require(bool(message.parts or message.tool_calls), f"{path}.parts", "is empty")
    length = len(message.reasoning)
    for number, call in enumerate(message.tool_calls):
        length += len(call.arguments)
        violations.require(bool(_NAME.fullmatch(call.name)), f"{path}.tool_calls[{number}].name", _NAME_RULE)
        _check_object(f"{path}.tool_calls[{number}].arguments", call.arguments, violations)
    for number, part in enumerate(message.parts):
        if part.WhichOneof("part") is None:
            violations.add(f"{path}.parts[{number}]", "is empty")
        length += len(part.text)
    return length


def _check_object(path: str, text: str, violations: Violations) -> None:
    """Notes a text that is not a JSON object, or has a number that is none."""
    try:
        is_object = isinstance(load_json(text), dict)
    except WrongValue as error:
        violations.add(f"{path}.{error.path}", error.problem)
        return
    except UnicodeError:
        violations.add(path, "has half of a surrogate pair")
        return
    except (ValueError, RecursionError):
        is_object = False
    violations.require(is_object, path, "must be the text of a JSON object")


def _turn(message: generate_pb2.ChatMessage) -> Turn:
    if not media.has_media([message]):
        return Turn(message.role, "".join(part.text for part in message.parts), _more(message))
    parts = [ImagePart() if part.HasField("media") else part.text for part in message.parts]
    return Turn(message.role, parts, _more(message))


def _more(message: generate_pb2.ChatMessage) -> dict[str, object]:
    """The fields of a message that few have, as Hugging Face's templates call them. A template may ask which exist."""
    more: dict[str, object] = {}
    if message.tool_calls:
        more["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        more["tool_call_id"] = message.tool_call_id
    if message.name:
        more["name"] = message.name
    if message.reasoning:
        more["reasoning_content"] = message.reasoning
        more["thinking"] = message.reasoning  # its name in templates of gpt-oss
    return more


def _tool(tool: generate_pb2.Tool) -> dict[str, object]:
    parameters = json.loads(tool.parameters) if tool.parameters else {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _template_variables(chat: generate_pb2.ChatInput) -> dict[str, object]:
    try:
        variables: dict[str, object] = json_format.MessageToDict(chat.template_variables)
    except ValueError:
        path = next(_not_finite("chat.template_variables", struct_pb2.Value(struct_value=chat.template_variables)))
        raise InvalidRequest.of(path, "must be a finite number") from None
    except RecursionError:
        raise InvalidRequest.of("chat.template_variables", "is nested too deeply") from None
    return variables


def _not_finite(path: str, value: struct_pb2.Value) -> Iterator[str]:
    """The paths of numbers that are not finite."""
    match value.WhichOneof("kind"):
        case "number_value" if not math.isfinite(value.number_value):
            yield path
        case "struct_value":
            for name, inner in value.struct_value.fields.items():
                yield from _not_finite(f"{path}.{name}", inner)
        case "list_value":
            for index, inner in enumerate(value.list_value.values):
                yield from _not_finite(f"{path}[{index}]", inner)
