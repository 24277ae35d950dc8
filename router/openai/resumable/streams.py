"""Chats and completions that outlive their connection: a client that names an event goes on after it, on any router."""

import asyncio
import math
from binascii import crc32
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2
from baton_http2.server.reply import Reply
from router.openai.call import HttpCall
from router.openai.choices import Answering, ChoiceStream, Kind, TokenText, now
from router.openai.exchange import AnswerStream, run_stream
from router.openai.resumable.event_ids import HEADER, EventId, EventIds, Origin
from router.openai.resumable.responses import NumberedStream
from router.openai.resumable.skipping import SkippingStream
from router.openai.stored.document import ResponseDocument
from router.request_path import RequestPath
from router.resume.resumer import Resumer

KEEP_HEADER = "x-baton-keep"
_ID_PREFIXES: dict[Kind, str] = {"chat": "chatcmpl-", "text": "cmpl-"}
_LARGE_BYTES = 64 * 1024  # the checksum of more is made in a thread


@dataclass(frozen=True, slots=True)
class AskedChoices:
    """A request for a stream, by one of the endpoints."""

    kind: Kind
    request: generate_pb2.GenerateRequest
    token_text: TokenText
    wants_usage: bool


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """A request for the stream of a response, and the event that it goes on after."""

    request: generate_pb2.GenerateRequest
    origin: Origin
    last: EventId | None

    @property
    def identity(self) -> str:
        """The id of the response, on all of its streams."""
        return f"resp_{self.origin.name:016x}"


def keep_seconds_of(call: HttpCall, in_body: float | None, *, is_stream: bool) -> float:
    """The seconds that a stream is to go on without its client; 0 if it ends with it. Raises InvalidRequest."""
    given = _header(call, KEEP_HEADER)
    field = "stream_options.keep_seconds" if given is None else KEEP_HEADER
    seconds = (in_body or 0.0) if given is None else _number(given)
    if seconds is None or not 0 <= seconds <= 1e6:
        raise InvalidRequest.of(field, "is not a number of seconds")
    if seconds and not is_stream:
        raise InvalidRequest.of(field, "keeps streams only: set stream")
    if is_stream and not seconds and _header(call, HEADER) is not None:
        raise InvalidRequest.of(HEADER, f"comes without {KEEP_HEADER}, so there is nothing to go on with")
    return seconds


def last_event_id(call: HttpCall) -> str | None:
    """The id of the last event that a client has, if it goes on."""
    return _header(call, HEADER)


async def checksum(kind: str, request: generate_pb2.GenerateRequest) -> int:
    """The checksum of a request, by which an id is known to be of the answer to it."""

    def made() -> int:
        same = generate_pb2.GenerateRequest()
        same.CopyFrom(request)
        same.request_id = ""
        return crc32(same.SerializeToString(deterministic=True), crc32(kind.encode()))

    return await asyncio.to_thread(made) if request.ByteSize() > _LARGE_BYTES else made()


class ResumableStreams:
    """Runs streams that go on for `seconds` without their clients."""

    def __init__(self, path: RequestPath) -> None:
        self._path = path
        self._resumer = Resumer(path.contexts, path.pipeline)

    async def run(self, call: HttpCall, asked: AskedChoices, seconds: float) -> None:
        """Streams an answer, or what follows the event that the client names.

        Raises InvalidRequest for an id that is none of this request.
        """
        request, count, most = asked.request, max(1, asked.request.sampling.n), self._path.pipeline.limits.max_answers
        if count > most:
            raise InvalidRequest.of("sampling.n", f"must be in [1, {most}], is {count}")
        # A call comes as a whole: a position counts calls, and no parts of them.
        request.response.ClearField("stream_tool_calls")
        crc = await checksum(asked.kind, request)
        last = self._last(call, count, crc)
        origin = last.origin if last else Origin.new(now(), crc)
        identity = f"{_ID_PREFIXES[asked.kind]}{origin.name:016x}"
        answering = Answering(asked.kind, identity, asked.token_text, origin.created)
        ids = EventIds(origin, count, last.positions if last else ())
        stream: AnswerStream = ChoiceStream(call, answering, asked.wants_usage, ids)
        if last is not None:
            if await run_stream(call, stream, self._adopt(call, last, count, stream)):
                return
            request.sampling.seed = origin.seed
            stream = SkippingStream(stream, last.positions)
        request.response.keep.FromNanoseconds(int(seconds * 1e9))
        ctx = self._path.contexts.create(request, call)
        await run_stream(call, stream, self._path.pipeline.run(ctx, _reply(stream)))

    async def run_response(
        self, call: HttpCall, document: ResponseDocument, asked: AskedResponse, seconds: float
    ) -> None:
        """The same for a response, whose events are those of a document."""
        request, last, ids = asked.request, asked.last, EventIds(asked.origin, 1)
        stream = NumberedStream(call, document, ids, last.positions[0] if last else None)
        if last is not None:
            message = generate_pb2.ResumeGenerationRequest(handle=last.handle)
            message.request.sampling.n = 1
            if await run_stream(call, stream, self._resumer.adopt(message, call, lambda _record: _reply(stream))):
                return
            request.sampling.seed = asked.origin.seed
        request.response.keep.FromNanoseconds(int(seconds * 1e9))
        ctx = self._path.contexts.create(request, call)
        await run_stream(call, stream, self._path.pipeline.run(ctx, _reply(stream)))

    async def response(self, call: HttpCall, request: generate_pb2.GenerateRequest) -> AskedResponse:
        """The request for a response, and the event that its client has."""
        request.response.ClearField("stream_tool_calls")
        crc = await checksum("response", request)
        last = self._last(call, 1, crc)
        return AskedResponse(request, last.origin if last else Origin.new(now(), crc), last)

    def _last(self, call: HttpCall, count: int, crc: int) -> EventId | None:
        text = last_event_id(call)
        if text is None:
            return None
        last = EventId.parse(text, self._path.pipeline.limits.max_answers)
        last.require_request(crc)
        if len(last.positions) != count:
            raise InvalidRequest.of(HEADER, "is of another number of answers")
        return last

    def _adopt(self, call: HttpCall, last: EventId, count: int, stream: AnswerStream) -> Coroutine[Any, Any, bool]:
        message = generate_pb2.ResumeGenerationRequest(
            handle=last.handle, have=[one.message(index) for index, one in enumerate(last.positions)]
        )
        message.request.sampling.n = count
        return self._resumer.adopt(message, call, lambda _record: _reply(stream))


def _reply(stream: AnswerStream) -> Reply:
    return Reply(stream.send, lambda _trailer: None)


def _header(call: HttpCall, name: str) -> str | None:
    return next((value for key, value in call.invocation_metadata() if key == name), None)


def _number(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None
