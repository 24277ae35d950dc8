"""Chats and completions that outlive their connection: a client that names an event goes on after it, on any router.

An answer that is computed again from its beginning, for a client that has a part of it and no ids.
"""

import asyncio
import math
from binascii import crc32
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError, InvalidRequest, StreamDiverged
from baton.inference.v1 import generate_pb2
from baton_http2.server.reply import Reply
from router.openai.call import HttpCall
from router.openai.choices import Answering, ChoiceStream, Kind, TokenText, now
from router.openai.exchange import AnswerStream, run_stream
from router.openai.resumable.event_ids import HEADER, EventId, EventIds, Origin, Position
from router.openai.resumable.responses import NumberedStream
from router.openai.stored.document import ResponseDocument
from router.request_path import RequestPath
from router.resume.resumer import Resumer


@dataclass(slots=True)
class _Text:
    """The part of a text that is left to skip, and the checksum that it must have."""

    bytes_left: int
    expected_crc: int
    crc: int = 0

    def cut(self, text: str) -> str:
        """The text without what the client has. Raises StreamDiverged if it has another one."""
        if not self.bytes_left or not text:
            return text
        whole = text.encode()
        had, rest = whole[: self.bytes_left], whole[self.bytes_left :]
        self.bytes_left -= len(had)
        self.crc = crc32(had, self.crc)
        if not self.bytes_left and self.crc != self.expected_crc:
            raise _diverged()
        try:
            return rest.decode()
        except UnicodeDecodeError:
            raise _diverged() from None


class _Skipped:
    """The part of one answer that its client has."""

    def __init__(self, had: Position) -> None:
        self._tokens, self._calls, self.is_finished = had.tokens, had.tool_calls, had.is_finished
        self._text = _Text(had.text_bytes, had.text_crc)
        self._reasoning = _Text(had.reasoning_bytes, had.reasoning_crc)

    def cut(self, delta: generate_pb2.TokenDelta) -> None:
        """Leaves of a delta what the client has not."""
        delta.text, delta.reasoning = self._text.cut(delta.text), self._reasoning.cut(delta.reasoning)
        had = min(self._tokens, len(delta.token_ids))
        self._tokens -= had
        del delta.token_ids[:had]
        del delta.logprobs[: min(had, len(delta.logprobs))]
        calls = min(self._calls, len(delta.tool_calls))
        self._calls -= calls
        del delta.tool_calls[:calls]

    def require_all(self) -> None:
        """Raises StreamDiverged for an answer that ends before the part that the client has."""
        if self._tokens or self._text.bytes_left or self._reasoning.bytes_left or self._calls:
            raise _diverged()


class SkippingStream:
    """Passes on to another stream what a client has not. Raises StreamDiverged if what it has is not the answer's."""

    def __init__(self, inner: AnswerStream, had: Sequence[Position]) -> None:
        self._inner = inner
        self._skipped = [_Skipped(position) for position in had]

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        """Takes the next message of the answer that is computed again."""
        match message.WhichOneof("event"):
            case "token" if message.token.index < len(self._skipped):
                self._skipped[message.token.index].cut(message.token)
                if not _has_any(message.token):
                    return
            case "answer_finished" if message.answer_finished.index < len(self._skipped):
                skipped = self._skipped[message.answer_finished.index]
                skipped.require_all()
                if skipped.is_finished:
                    return
            case "finished":
                for skipped in self._skipped:
                    skipped.require_all()
        await self._inner.send(message)

    async def fail(self, error: BatonError) -> None:
        """Ends a stream that has begun."""
        await self._inner.fail(error)


def _has_any(delta: generate_pb2.TokenDelta) -> bool:
    return bool(delta.token_ids or delta.text or delta.reasoning or delta.tool_calls)


def _diverged() -> StreamDiverged:
    return StreamDiverged("computed again, the answer is not the one that the client has: send the request anew")


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
