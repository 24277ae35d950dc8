"""Baton's errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, and the HTTP status."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

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

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {405: "invalid_request_error", 409: "conflict_error", 413: "invalid_request_error", 429: "rate_limit_error"}

# Fields of GenerateRequest by their names in OpenAI's API; the first that fits.
_RENAMED = (
    (re.compile(r"^sampling\."), ""),
    (re.compile(r"^options\.(width|height)"), "size"),
    (re.compile(r"^options\.number"), "n"),
    (re.compile(r"^options\.preview_steps"), "partial_images"),
    (re.compile(r"^options\."), ""),
    (re.compile(r"^stopping\.max_tokens"), "max_tokens"),
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
# How the message of an error begins that is about one picture.
_PICTURE = re.compile(r"^chat\.messages\[\d+\]\.parts\[\d+\]\.media\S*(?=: )")
# The fields that the message of Unsupported names.
LACKED = re.compile(r"\b(?:sampling|options)\.\w+")
# What a grammar is in GenerateRequest, and a tag's schema in it.
_IS_GUIDED = re.compile(r"^guided(\.|$)")
_GUIDED = re.compile(r"^guided\.(json_schema|regex|grammar|choice(\.texts)?|structural_tags)")
_TAG = re.compile(r"\.tags(\[\d+\])?(\.json_schema)?")


class HttpRefusal(BatonError):
    """A request that HTTP refuses before it becomes a request to a model: no such path, or a body that is too large."""

    reason = "INVALID_HTTP_REQUEST"

    def __init__(self, status: int, message: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.allowed = allowed  # the methods of a path that has not this one


class UnsupportedField(Unsupported):
    """A field of OpenAI's API that Baton has not, or has not with this value."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


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


def failure_of(error: BatonError, guided_field: str = "") -> ErrorResponse:
    """The response for an error. `guided_field` is where the request's body has its grammar."""
    body = json.dumps({"error": describe(error, guided_field)}).encode()
    return ErrorResponse(status_of(error), body, headers_of(error))


def headers_of(error: BatonError) -> tuple[tuple[bytes, bytes], ...]:
    """When to try again, which methods a path has, and how to authenticate."""
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, (Overloaded, QuotaExceeded, RouterStarting)):
        headers.append((b"retry-after", str(max(1, round(error.retry_after_seconds))).encode()))
        headers.append((b"retry-after-ms", str(round(error.retry_after_seconds * 1e3)).encode()))
    if isinstance(error, HttpRefusal) and error.allowed:
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    return tuple(headers)


def describe(error: BatonError, guided_field: str = "") -> dict[str, str | None]:
    """The object `error` of OpenAI's API. Of several wrong fields `param` names the first, the message all."""
    param, message = (error.field if isinstance(error, UnsupportedField) else None), error.message
    if isinstance(error, InvalidRequest):
        renamed = [(_param(one.field, guided_field), one.description) for one in error.violations]
        param = renamed[0][0]
        message = "; ".join(f"{field}: {description}" for field, description in renamed)
    elif picture := _PICTURE.match(message):
        param = _param(picture[0], guided_field)
        message = param + message[picture.end() :]
    elif isinstance(error, Unsupported) and (lacked := LACKED.search(message)):
        param = param or _param(lacked[0], guided_field)
        message = LACKED.sub(lambda field: _param(field[0], guided_field), message)
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


def _param(field: str, guided_field: str) -> str:
    if _IS_GUIDED.match(field):
        return _guided_param(field, guided_field or "response_format")
    for pattern, name in _RENAMED:
        if pattern.search(field):
            return pattern.sub(name, field, count=1)
    return field


def _guided_param(field: str, guided_field: str) -> str:
    found = _GUIDED.match(field)
    if found is None:
        return guided_field.partition(".")[0]
    rest = field[found.end() :]
    if found[1] == "structural_tags":
        rest = _TAG.sub(lambda tag: f".structures{tag[1] or ''}{'.schema' if tag[2] else ''}", rest, count=1)
    return guided_field + rest
