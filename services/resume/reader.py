"""The call of one router that reads a kept decode: what is new, as responses, until its end."""

import asyncio
from collections.abc import Callable, Sequence

from baton.engine.v1 import decode_pb2
from baton.errors import BatonError, EngineFailed, Unavailable
from engine_protocol.lane import TokenReply
from services.resume.logprobs import KeptLogprobs
from services.resume.stream import KeptStream


class StreamReader:
    """Reads a kept stream from `at` on, for one call. A TokenSource of its ids, while it is the stream's reader."""

    __slots__ = ("_at", "_stream", "ready")

    def __init__(self, stream: KeptStream, at: int) -> None:
        self.ready: Callable[[], None] = _nothing
        self._stream = stream
        self._at = at
        stream.read_tokens = max(stream.read_tokens, at)

    async def subscribe(self, ready: Callable[[], None]) -> None:
        """Calls `ready` whenever there is something new."""
        self.ready = ready
        self._stream.subscribe(self)

    def pull(self) -> tuple[Sequence[int], bool]:
        """The ids since the last time. Raises StreamAdopted once another reader has come."""
        stream, at = self._stream, self._at
        if stream.reader is not self:
            stream.require(self)
        ids = stream.drain()
        self._at = stream.read_tokens = len(stream.ids)
        if at + len(ids) != self._at:
            # Others came before: while no router read, or as tokens that are more than their ids.
            ids = stream.ids[at:].tolist()
        return ids, stream.is_over

    async def write_to(self, reply: TokenReply) -> None:
        """Writes all that is left of the stream. Raises what ended it, if it failed, and StreamAdopted."""
        await self._changed(lambda: self._stream.accepted is not None or self._stream.has_ended)
        if self._stream.accepted is not None:
            await reply.write(decode_pb2.DecodeResponse.FromString(self._stream.accepted))
        if self._stream.logprobs is not None:
            await self._write_logprobs(reply, self._stream.logprobs)
        else:
            await reply.write_from(self, _tokens_response)
        await self._changed(lambda: self._stream.has_ended)
        if self._stream.finished is None:
            raise _failure(self._stream.pop_error())
        await reply.write(decode_pb2.DecodeResponse.FromString(self._stream.finished))
        self._stream.is_told = True

    async def _write_logprobs(self, reply: TokenReply, logprobs: KeptLogprobs) -> None:
        is_last = False
        while not is_last:
            await self._changed(lambda: len(self._stream.ids) > self._at or self._stream.is_over)
            response = self._next_tokens(logprobs)
            is_last = self._stream.is_over
            if response.tokens.token_ids:
                await reply.write(response)
                logprobs.forget_before(len(self._stream.ids) - self._at)

    def _next_tokens(self, logprobs: KeptLogprobs) -> decode_pb2.DecodeResponse:
        stream, at = self._stream, self._at
        self._at = stream.read_tokens = len(stream.ids)
        tokens = decode_pb2.DecodedTokens(token_ids=stream.ids[at:].tolist())
        if logprobs.of_tokens:
            tokens.logprobs.extend(logprobs.last(self._at - at) or ())
        if logprobs.prompt is not None:
            tokens.prompt_logprobs.CopyFrom(logprobs.prompt)
            logprobs.prompt = None
        return decode_pb2.DecodeResponse(tokens=tokens)

    async def _changed(self, has_come: Callable[[], bool]) -> None:
        """Waits for something of the stream. Raises StreamAdopted once another reader has come."""
        arrived = asyncio.Event()
        await self.subscribe(arrived.set)
        self._stream.require(self)
        while not has_come():
            await arrived.wait()
            arrived.clear()
            self._stream.require(self)


def _failure(error: Exception | None) -> Exception:
    """The error of a reader whose stream has no end. Each raises its own: one raised twice keeps frames."""
    if error is None:
        return Unavailable("the decode was ended to make room, or by the router that read it before")
    if isinstance(error, BatonError):
        return error
    return EngineFailed("the decode failed")


def _tokens_response(ids: Sequence[int]) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(tokens=decode_pb2.DecodedTokens(token_ids=ids))


def _nothing() -> None:
    """No callback."""
