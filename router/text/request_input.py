"""The input of a request: checks of texts and conversations, and from them to token ids.

Generate and Tokenize share it.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import chain

from google.protobuf import json_format, struct_pb2

from baton.errors import InvalidRequest, Unsupported
from baton.inference.v1 import generate_pb2
from router.config import LimitsConfig
from router.text import media_validation as media
from router.text.chat_template import LONGEST_SECONDS, ImagePart, Turn
from router.text.json_values import WrongValue, load_json
from router.text.served_model import ServedModel
from router.text.tokenizer import Tokenizer
from rpc.violations import Violations
from runtime.threads import in_pieces

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_NAME_RULE = "must be 1 to 64 letters, digits, or any of _ . -"
_RESERVED_VARIABLES = ("messages", "tools", "documents")


def tokenize(
    request: generate_pb2.GenerateRequest, model: ServedModel, template_seconds: float = LONGEST_SECONDS
) -> tuple[int, ...]:
    """The ids of a validated request's input, with one placeholder for each media item. Slow for long texts.

    Raises InvalidRequest if they cannot fit, including the tokens that the media are known to take, and SlowTemplate if
    the chat template takes longer than `template_seconds`, which are fewer than its LONGEST_SECONDS.
    """
    match request.WhichOneof("input"):
        case "token_ids":
            ids = tuple(chain.from_iterable(in_pieces(request.token_ids.ids)))
        case "chat":
            ids = tuple(encode_chat(request.chat, model, template_seconds, request.routing.cache_salt)[0])
        case _:
            ids = tuple(text_tokenizer(model).encode(request.prompt, request.routing.cache_salt))
    if not ids:
        raise InvalidRequest.of(_input_field(request), "has no tokens")
    media.require_places(request, ids, model)
    require_fits_context(request, expected_tokens(request, ids, model), model)
    return ids


def bad_sequences(request: generate_pb2.GenerateRequest, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """The ids of a validated request's bad words, each sequence once. Raises InvalidRequest for a word without any."""
    words = request.sampling.bad_words
    if not words:
        return ()
    encoded = text_tokenizer(model).encode_words(words)
    for index, ways in enumerate(encoded):
        if () in ways:
            raise InvalidRequest.of(f"sampling.bad_words[{index}]", "has no tokens")
    return tuple(dict.fromkeys(ids for ways in encoded for ids in ways))


def encode_chat(
    chat: generate_pb2.ChatInput, model: ServedModel, template_seconds: float = LONGEST_SECONDS, salt: str = ""
) -> tuple[list[int], str]:
    """The ids of a conversation, and the text that the template renders. Raises as `tokenize`."""
    tokenizer = text_tokenizer(model)
    turns = [_turn(message) for message in chat.messages]
    tools = [_tool(tool) for tool in chat.tools]
    text = tokenizer.render(turns, _template_variables(chat), template_seconds, tools)
    violations = Violations()
    _check_length("chat.messages", len(text), model, violations)
    violations.raise_any()
    return tokenizer.encode_chat(text, salt), text


def expected_tokens(request: generate_pb2.GenerateRequest, token_ids: Sequence[int], model: ServedModel) -> int:
    """The expected length of the prompt with its media, before they are encoded."""
    if model.images is None:
        return len(token_ids)
    return len(token_ids) + media.count_media(request) * max(0, model.images.tokens_per_image - 1)


def require_fits_context(request: generate_pb2.GenerateRequest, prompt_tokens: int, model: ServedModel) -> None:
    """Raises InvalidRequest if a prompt of this length leaves no room for an answer."""
    most = model.limits.max_context_tokens
    if prompt_tokens >= most:
        text = f"has {prompt_tokens} tokens, which leaves no room in the context of {most}"
        raise InvalidRequest.of(_input_field(request), text)


def text_tokenizer(model: ServedModel) -> Tokenizer:
    """The model's tokenizer. Raises Unsupported if it takes no text."""
    if model.tokenizer is None:
        raise unsupported("text", model)
    return model.tokenizer


def bound_chat(chat: generate_pb2.ChatInput, limits: LimitsConfig, violations: Violations) -> None:
    """Notes a conversation with too many messages or parts."""
    if violations.count("chat.messages", len(chat.messages), limits.max_messages):
        parts = sum(len(message.parts) for message in chat.messages)
        parts += sum(len(message.tool_calls) for message in chat.messages)
        violations.count("chat.messages.parts", parts, limits.max_message_parts)
    violations.count("chat.tools", len(chat.tools), limits.max_tools)


def bound_ids(field: str, ids: Sequence[int], model: ServedModel, violations: Violations) -> None:
    """Notes more token ids than the model's context holds."""
    violations.count(field, len(ids), model.limits.max_context_tokens)


def check_prompt(prompt: str, model: ServedModel, violations: Violations) -> None:
    """Notes a text that is empty, or too long to fit."""
    violations.require(bool(prompt), "prompt", "is empty")
    _check_length("prompt", len(prompt), model, violations)


def check_chat(chat: generate_pb2.ChatInput, model: ServedModel, violations: Violations) -> None:
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
    _check_length("chat.messages", length, model, violations)
    for name in _RESERVED_VARIABLES:
        reserved = name in chat.template_variables.fields
        violations.require(not reserved, f"chat.template_variables.{name}", "is reserved for the template")


def require_chat(chat: generate_pb2.ChatInput, model: ServedModel) -> None:
    """Raises Unsupported if the model takes no conversations, or none with media."""
    if not model.can_chat:
        raise unsupported("chat", model)
    if chat.tools and not model.capabilities.tools:
        raise unsupported("tools", model)
    if media.has_media(chat.messages) and not model.capabilities.modalities:
        raise unsupported("media", model)


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


def _check_length(field: str, length: int, model: ServedModel, violations: Violations) -> None:
    if model.tokenizer is None:
        return
    most = model.limits.max_context_tokens * model.tokenizer.longest_token
    violations.require(
        length <= most, field, f"has {length} characters; the context of the model never holds more than {most}"
    )


def unsupported(what: str, model: ServedModel) -> Unsupported:
    """The error for something that the model lacks."""
    return Unsupported(f"{model.name} does not support {what}; it supports {model.abilities}")


def _input_field(request: generate_pb2.GenerateRequest) -> str:
    return {"token_ids": "token_ids.ids", "chat": "chat.messages"}.get(request.WhichOneof("input") or "", "prompt")


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
