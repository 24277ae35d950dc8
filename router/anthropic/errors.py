"""Baton's errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

import json
import re
from collections.abc import Mapping
from typing import Any

from baton.errors import BatonError, InvalidRequest, Overloaded, Unsupported
from router.openai.call import HttpCall
from router.openai.errors import LACKED, ErrorResponse, UnsupportedField, headers_of, status_of
from router.openai.exchange import MODELS_PATH, Api, Headers

MESSAGES = "/v1/messages"
_VERSION_HEADER = "anthropic-version"
_OVERLOADED = 529

THREAD = "thread"  # the field of a body: a conversation that the server holds
# By this the official packages know that they are to send the conversation instead.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}

# Fields of GenerateRequest by their names in Anthropic's API; the first that fits. Those of messages come before.
_RENAMED = (
    (re.compile(r"^stopping\.stop\b"), "stop_sequences"),
    (re.compile(r"^(sampling|stopping|routing)\."), ""),
    (re.compile(r"^chat\.tools(\[\d+\])\.parameters"), r"tools\1.input_schema"),
    (re.compile(r"^chat\.tool_choice\.is_single"), "tool_choice.disable_parallel_tool_use"),
    (re.compile(r"^guided(\.json_schema)?"), "output_config.format.schema"),
    (re.compile(r"^cache\.retain(\.\w+)?"), "cache_control"),
    (re.compile(r"^chat\."), ""),
)
_PART = re.compile(r"^chat\.messages\[\d+\](\.(parts|tool_calls)\[\d+\])?")
_TURN = re.compile(r"^chat\.messages\[\d+\]")
_CALL_FIELD = re.compile(r"^\.arguments")
_MEDIA_FIELD = re.compile(r"^\.media(\.(uri|data|mime_type))?")


def failure_of(error: BatonError, call: HttpCall) -> ErrorResponse:
    """The response for an error."""
    body = {"type": "error", "error": describe(error, call.places), "request_id": call.request_id}
    return ErrorResponse(_status(error), json.dumps(body).encode(), headers_of(error))


def describe(error: BatonError, places: Mapping[str, str]) -> dict[str, Any]:
    """The object `error`. `places` are where the body has the turns and parts of the request's conversation."""
    message = error.message
    if isinstance(error, InvalidRequest):
        message = "; ".join(f"{field_name(one.field, places)}: {one.description}" for one in error.violations)
    elif found := _PART.match(message):
        field, separator, rest = message.partition(": ")
        message = field_name(field, places) + separator + rest if separator else places.get(found[0], field)
    elif isinstance(error, Unsupported):
        message = LACKED.sub(lambda one: field_name(one[0], places), message)
    described = {"type": _TYPES.get(_status(error), "api_error"), "message": message}
    is_of_thread = isinstance(error, UnsupportedField) and error.field == THREAD
    return {**described, "details": _NO_THREADS} if is_of_thread else described


def field_name(field: str, places: Mapping[str, str]) -> str:
    """The name in the body of a field of GenerateRequest."""
    for pattern in (_PART, _TURN):
        if (found := pattern.match(field)) and found[0] in places:
            rest = _CALL_FIELD.sub(".input", _MEDIA_FIELD.sub(".source", field[found.end() :]))
            return places[found[0]] + rest.removesuffix(".parts")
    for renamed, name in _RENAMED:
        if renamed.search(field):
            return renamed.sub(name, field, count=1)
    return field


def _status(error: BatonError) -> int:
    return _OVERLOADED if isinstance(error, Overloaded) else status_of(error)


def _claims(path: str, headers: Headers) -> bool:
    """The models are listed in this API's form for its clients, all of which send its version."""
    is_models = path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")
    return (
        path == MESSAGES
        or path.startswith(f"{MESSAGES}/")
        or (is_models and any(name == _VERSION_HEADER for name, _ in headers))
    )


ANTHROPIC = Api("/anthropic", failure_of, _claims)
