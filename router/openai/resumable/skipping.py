"""An answer that is computed again from its beginning, for a client that has a part of it and no ids."""

from binascii import crc32
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import BatonError, StreamDiverged
from baton.inference.v1 import generate_pb2
from router.openai.exchange import AnswerStream
from router.openai.resumable.event_ids import Position


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
