"""Baton's errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, and the HTTP status."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    QuotaUnavailable,
    RequestExists,
    RequestNotFound,
    RouterStarting,
    SlowReader,
    StaleAttempt,
    StreamAdopted,
    StreamDiverged,
    StreamLost,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from runtime.aio import leaf_errors

log = structlog.get_logger(__name__)

# Subclasses that are not listed have their parent's status. OpenAI's clients try 408, 409, 429 and 5xx again.
STATUSES: dict[type[BatonError], int] = {
    BatonError: 500,
    Cancelled: 499,
    DeadlineExceeded: 504,
    InvalidRequest: 400,
    ModelNotFound: 404,
    Overloaded: 503,
    PermissionDenied: 403,
    QuotaExceeded: 429,
    RequestExists: 409,
    RequestNotFound: 404,
    SlowReader: 408,
    StaleAttempt: 409,
    StreamAdopted: 409,
    StreamDiverged: 409,
    StreamLost: 404,
    Unauthenticated: 401,
    Unavailable: 503,
    Unsupported: 400,
}

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}

# Fields of GenerateRequest by their names in OpenAI's API; the first that fits.
_RENAMED = (
    (re.compile(r"^sampling\."), ""),
    (re.compile(r"^options\.(width|height)"), "size"),
    (re.compile(r"^options\.number"), "n"),
    (re.compile(r"^options\.preview_steps"), "partial_images"),
    (re.compile(r"^options\."), ""),
    (re.compile(r"^stopping\."), ""),
    (re.compile(r"^response\.logprobs"), "top_logprobs"),
    (re.compile(r"^chat\.template_variables"), "chat_template_kwargs"),
    (
        re.compile(r"^chat\.messages(\[\d+\])\.parts(\[\d+\])\.media(\.(uri|data))?"),
        r"messages\1.content\2.image_url.url",
    ),
    (re.compile(r"^chat\.messages(\[\d+\])?\.parts(\[\d+\])?"), r"messages\1.content\2"),
    (re.compile(r"^chat\.tool_choice\.is_single"), "parallel_tool_calls"),
    (re.compile(r"^chat\."), ""),
    (re.compile(r"^routing\.session_key"), "prompt_cache_key"),
    (re.compile(r"^cache\.ends_session"), "baton.end_session"),
    (re.compile(r"^cache\."), "baton."),
    (re.compile(r"^routing\."), ""),
    (re.compile(r"^token_ids\.ids"), "prompt"),
    (re.compile(r"^inputs(\[\d+\])?(\.token_ids\.ids)?"), r"input\1"),
)
# A turn of a conversation, and one of its calls.
_TURN = re.compile(
    r"^chat\.messages\[(?P<turn>\d+)\](\.tool_calls\[(?P<call>\d+)\](?P<of_call>.*)|(?P<rest>.*))$", re.DOTALL
)
_CONTENT = re.compile(r"^\.parts(\[\d+\])?")
_IMAGE_URL = re.compile(r"\.media(\.(uri|data))?$")
# What a tool and a call have in their `function`.
_OF_FUNCTION = re.compile(
    r"^(chat\.(?:tools\[\d+\]|messages\[\d+\]\.tool_calls\[\d+\]|tool_choice))\.(name|description|parameters|arguments)"
)
# How the message of an error begins that is about one picture.
_PICTURE = re.compile(r"^chat\.messages\[\d+\]\.parts\[\d+\]\.media\S*(?=: )")
# The fields that the message of Unsupported names.
LACKED = re.compile(r"\b(?:sampling|options)\.\w+")
# What a grammar is in GenerateRequest, and a tag's schema in it.
_IS_GUIDED = re.compile(r"^guided(\.|$)")
_GUIDED = re.compile(r"^guided\.(json_schema|regex|grammar|choice(\.texts)?|structural_tags)")
_TAG = re.compile(r"\.tags(\[\d+\])?(\.json_schema)?")


class HttpRefusal(Unsupported):
    """A request that HTTP refuses before it becomes a request to a model: no such path, or a body that is too large.

    `header` says what would be accepted, as `allow` does.
    """

    reason = "INVALID_HTTP_REQUEST"

    def __init__(self, status: int, message: str, header: tuple[bytes, bytes] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.header = header


class UnsupportedField(Unsupported):
    """A field of OpenAI's API that Baton has not, or has not with this value."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


class TurnPlace(NamedTuple):
    """A turn's place in `input`, its first call, and the field that has its content."""

    item: int
    first_call: int
    content: str = "content"


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The names that a body has for fields of GenerateRequest, for errors.

    `guided` is its grammar, and `function` comes between a tool, or a call, and its name. If its conversation is no
    `messages`, `items` are the places of the turns after the first `before` ones.
    """

    guided: str = ""
    max_tokens: str = "max_tokens"
    function: str = ""
    before: int = 0
    items: Sequence[TurnPlace] | None = None


PLAIN_NAMES = FieldNames()


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error as a response. `headers` are those that say when to try again."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


def known_error(method: str, error: Exception) -> BatonError:
    """The error that the client gets to know of."""
    found = leaf_errors(error)
    known = [one for one in found if isinstance(one, BatonError)]
    if len(known) < len(found):
        log.error("call failed", method=method, exc_info=error)
        return BatonError("internal error")
    return known[0]


def failure_of(error: BatonError, names: FieldNames = PLAIN_NAMES) -> ErrorResponse:
    """The response for an error."""
    body = json.dumps({"error": describe(error, names)}).encode()
    return ErrorResponse(status_of(error), body, headers_of(error))


def headers_of(error: BatonError) -> tuple[tuple[bytes, bytes], ...]:
    """The time to try again, the values accepted, and the way to authenticate."""
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, (Overloaded, QuotaExceeded, QuotaUnavailable, RouterStarting)):
        headers.append((b"retry-after", str(max(1, round(error.retry_after_seconds))).encode()))
        headers.append((b"retry-after-ms", str(round(error.retry_after_seconds * 1e3)).encode()))
    if isinstance(error, HttpRefusal) and error.header is not None:
        headers.append(error.header)
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    return tuple(headers)


def describe(error: BatonError, names: FieldNames = PLAIN_NAMES) -> dict[str, str | None]:
    """The object `error` of OpenAI's API. Of several wrong fields `param` names the first, the message all."""
    param, message = (error.field if isinstance(error, UnsupportedField) else None), error.message
    if isinstance(error, InvalidRequest):
        renamed = [(_param(one.field, names), one.description) for one in error.violations]
        param = renamed[0][0]
        message = "; ".join(f"{field}: {description}" for field, description in renamed)
    elif picture := _PICTURE.match(message):
        param = _param(picture[0], names)
        message = param + message[picture.end() :]
    elif isinstance(error, Unsupported) and (lacked := LACKED.search(message)):
        param = param or _param(lacked[0], names)
        message = LACKED.sub(lambda field: _param(field[0], names), message)
    return {
        "message": message,
        "type": _TYPES.get(status_of(error), "server_error"),
        "param": param,
        "code": error.reason.lower(),
    }


def status_of(error: BatonError) -> int:
    """The HTTP status."""
    if isinstance(error, HttpRefusal):
        return error.status
    return next(STATUSES[parent] for parent in type(error).__mro__ if parent in STATUSES)


def _param(field: str, names: FieldNames) -> str:
    if _IS_GUIDED.match(field):
        return _guided_param(field, names.guided or "response_format")
    if field == "stopping.max_tokens":
        return names.max_tokens
    if names.items is not None and (turn := _TURN.match(field)):
        return _item(turn, names)
    if names.items is not None and field == "chat.messages":
        return "input"
    field = _OF_FUNCTION.sub(rf"\1.{names.function}\2", field)
    for pattern, name in _RENAMED:
        if pattern.search(field):
            return pattern.sub(name, field, count=1)
    return field


def _item(turn: re.Match[str], names: FieldNames) -> str:
    """The field of `input` that a turn is, or one of its calls."""
    number = int(turn["turn"]) - names.before
    if names.items is None or not 0 <= number < len(names.items):
        return "input"
    place = names.items[number]
    if turn["call"] is not None:
        return f"input[{place.first_call + int(turn['call'])}]{turn['of_call']}"
    rest = _CONTENT.sub(rf".{place.content}\1", turn["rest"])
    return f"input[{place.item}]{_IMAGE_URL.sub('.image_url', rest)}"


def _guided_param(field: str, guided_field: str) -> str:
    found = _GUIDED.match(field)
    if found is None:
        return guided_field.partition(".")[0]
    rest = field[found.end() :]
    if found[1] == "structural_tags":
        rest = _TAG.sub(lambda tag: f".structures{tag[1] or ''}{'.schema' if tag[2] else ''}", rest, count=1)
    return guided_field + rest
