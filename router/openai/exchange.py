"""One exchange over HTTP, whatever its API: a body becomes a request to the pipeline, and its answer is written."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from pydantic import BaseModel

from baton.errors import BatonError, Draining, InvalidRequest
from baton.inference.v1 import generate_pb2
from baton_http2.input_budget import InputBudget
from baton_http2.server.reply import Reply
from router.openai.call import HttpCall
from router.openai.errors import ErrorResponse
from router.openai.fields import read
from router.openai.json_body import parse
from router.request_path import RequestPath
from router.stream.collector import UnaryCollector
from router.workers.text_limits import LongestTexts
from rpc.interceptors.calls import record_size
from rpc.interceptors.counting import TextLimits
from rpc.status import code_of
from runtime.aio import timeout
from runtime.telemetry.logs import add_log_fields

ENDED_BY_DRAIN = "the router ended before the request did"
_FAIL_SECONDS = 1.0  # for the last event of an answer that fails
_LARGE_BODY_BYTES = 4096  # reading a larger one on the event loop would delay other streams

Body = TypeVar("Body", bound=BaseModel)
Message = TypeVar("Message")


MODELS_PATH = "/v1/models"
MODEL_PATH = "/v1/models/{model}"
Headers: TypeAlias = Sequence[tuple[str, str]]
Handler: TypeAlias = Callable[[HttpCall, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Api:
    """An API over HTTP: what begins the names of its methods, as in logs and access rules, and its form of errors.

    `claims` says of which paths and headers its calls are, where another API has the same paths.
    """

    prefix: str
    failure: Callable[[BatonError, HttpCall], ErrorResponse]
    claims: Callable[[str, Headers], bool]


class ApiEndpoints(Protocol):
    """The endpoints of an API: by path, and then by HTTP method. MODEL_PATH stands for all paths of one model."""

    @property
    def api(self) -> Api: ...

    @property
    def handlers(self) -> Mapping[str, Mapping[str, Handler]]: ...


class FailableStream(Protocol):
    """A response that is written as it comes."""

    async def fail(self, error: BatonError) -> None:
        """Ends a stream that has begun."""


class AnswerStream(FailableStream, Protocol):
    """An answer that is written as it comes."""

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        """Writes the next message of the pipeline."""


class HttpExchange:
    """Reads bodies within their limits, and runs requests."""

    def __init__(self, path: RequestPath, texts: LongestTexts, max_body_bytes: int, input: InputBudget) -> None:
        self._path = path
        self._texts = texts
        self._max_body_bytes = max_body_bytes
        self._input = input

    async def read(
        self, call: HttpCall, kind: type[Body], make: Callable[[Body, str], Message], *, embeds: bool = False
    ) -> tuple[Body, Message]:
        """The body as one of the classes, and as the request to the pipeline; made in a thread if it is large."""
        body = await call.read_body(self._max_body_bytes, self._input)
        try:
            size = sum(map(len, body.pieces))
            record_size(size)
            if size > _LARGE_BODY_BYTES:
                limits = self._texts.limits(embeds=embeds)
                return await asyncio.to_thread(_requested, body.pieces, kind, make, call.request_id, limits)
            return _requested(body.pieces, kind, make, call.request_id)
        finally:
            body.hold.release()

    async def run(
        self, call: HttpCall, request: generate_pb2.GenerateRequest, stream: "AnswerStream | UnaryCollector"
    ) -> None:
        """Runs the request in the pipeline. An error after the response has begun ends it."""
        add_session(call, request)
        ctx = self._path.contexts.create(request, call)
        work = self._path.pipeline.run(ctx, Reply(stream.send, lambda _trailer: None))
        if isinstance(stream, UnaryCollector):
            async with call.while_connected():
                await work
        else:
            await run_stream(call, stream, work)


async def run_stream(call: HttpCall, stream: FailableStream, work: Coroutine[Any, Any, Any]) -> Any:
    """Runs what writes to a stream, while the client is there. An error after the response has begun ends it."""
    try:
        async with call.while_connected():
            return await work
    except BatonError as error:
        if not call.response_status:
            raise
        call.status = code_of(type(error))
        add_log_fields(reason=error.reason, error=error.message)
        await _fail(stream, error)
        return True
    except asyncio.CancelledError:
        if call.response_status and not call.cancelled():
            # The drain is over.
            await _fail(stream, Draining(ENDED_BY_DRAIN))
        raise


async def _fail(stream: FailableStream, error: BatonError) -> None:
    """Tells a client that reads why its answer ends here."""
    with suppress(TimeoutError):
        async with timeout(_FAIL_SECONDS):
            await stream.fail(error)


def add_session(call: HttpCall, request: generate_pb2.GenerateRequest) -> None:
    """Sets what headers say of the session. Raises InvalidRequest."""
    for name, value in call.invocation_metadata():
        match name:
            case "x-baton-session":
                request.routing.session_key = value
            case "x-baton-parent-session":
                request.cache.parent_session = value
            case "x-baton-session-end":
                if value not in ("true", "false"):
                    raise InvalidRequest.of(name, "must be true or false")
                request.cache.ends_session = value == "true"


def _requested(
    pieces: Sequence[bytes],
    kind: type[Body],
    make: Callable[[Body, str], Message],
    request_id: str,
    texts: TextLimits | None = None,
) -> tuple[Body, Message]:
    body = read(kind, parse(b"".join(pieces), texts))
    try:
        return body, make(body, request_id)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequest.of("body", f"has a value that no request can hold: {error}") from None
