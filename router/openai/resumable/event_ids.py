"""The ids of a stream's events: each tells all that is needed to go on after it, on any router.

    HANDLE;ORIGIN;ANSWER[/ANSWER...]

HANDLE finds the answer. ORIGIN is what does not change: seed, time, name and the checksum of the request. Each ANSWER
counts what its client has: TOKENS.BYTES.CRC of its text, and with reasoning, calls or log probabilities
.REASONING.CRC.CALLS.OFFSET. A letter follows: `o` for an answer that has begun without a token, `f` for one that has
ended, `u` for one that has ended and whose usage was told.
"""

import re
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error, crc32
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2
from router.resume.handle import Handle
from runtime.entropy import token_bytes

HEADER = "last-event-id"
_ORIGIN = struct.Struct(">QIQI")
_ORIGIN_LENGTH = len(urlsafe_b64encode(bytes(_ORIGIN.size)))
_NUMBER = r"\d{1,10}"
_CRC = r"[0-9a-f]{8}"  # all digits: one of the letters that follow is a digit, too
_ANSWER = re.compile(
    rf"({_NUMBER})\.({_NUMBER})\.({_CRC})(?:\.({_NUMBER})\.({_CRC})\.({_NUMBER})\.({_NUMBER}))?([ofu]?)", re.ASCII
)
_MOST_NUMBER = 2**32


@dataclass(frozen=True, slots=True)
class Origin:
    """The facts of an answer that its later streams share with the first."""

    seed: int
    created: int
    name: int  # in the identity of the answer, which clients see
    request_crc: int

    @classmethod
    def new(cls, created: int, request_crc: int) -> "Origin":
        """Of a new answer. Its seed is known once it has started."""
        return cls(0, created, int.from_bytes(token_bytes(8), "big"), request_crc)

    @classmethod
    def parse(cls, text: str) -> "Origin":
        """Reads what `text` has made. Raises ValueError."""
        if len(text) != _ORIGIN_LENGTH:
            raise ValueError("of another length")
        try:
            return cls(*_ORIGIN.unpack(urlsafe_b64decode(text.encode())))
        except (Error, struct.error) as error:
            raise ValueError("not base64") from error

    @property
    def text(self) -> str:
        """The text, as ids have it."""
        return urlsafe_b64encode(_ORIGIN.pack(self.seed, self.created, self.name, self.request_crc)).decode()


@dataclass(slots=True)
class Position:
    """The part of one answer that a client has: sums, in UTF-8 bytes, and checksums."""

    tokens: int = 0
    text_bytes: int = 0
    text_crc: int = 0
    reasoning_bytes: int = 0
    reasoning_crc: int = 0
    tool_calls: int = 0
    offset: int = 0  # the characters of the tokens that had log probabilities
    state: str = ""

    @classmethod
    def parse(cls, text: str) -> "Position":
        """Reads what `text` has made. Raises ValueError."""
        found = _ANSWER.fullmatch(text)
        if found is None:
            raise ValueError("not a position")
        tokens, size, crc, reasoning, reasoning_crc, calls, offset, state = found.groups(default="0")
        position = cls(
            int(tokens), int(size), int(crc, 16), int(reasoning), int(reasoning_crc, 16), int(calls), int(offset)
        )
        position.state = "" if state == "0" else state
        if max(position.tokens, position.tool_calls) >= _MOST_NUMBER:
            raise ValueError("too large")
        return position

    @property
    def text(self) -> str:
        """The text, as ids have it."""
        short = f"{self.tokens}.{self.text_bytes}.{self.text_crc:08x}"
        if self.reasoning_bytes or self.tool_calls or self.offset:
            short += f".{self.reasoning_bytes}.{self.reasoning_crc:08x}.{self.tool_calls}.{self.offset}"
        return short + self.state

    @property
    def has_begun(self) -> bool:
        """True if the client knows that there is this answer."""
        return bool(self.tokens or self.state)

    @property
    def is_finished(self) -> bool:
        """True if the client has the end of the answer."""
        return self.state in ("f", "u")

    @property
    def knows_usage(self) -> bool:
        """True if the client has been told the usage."""
        return self.state == "u"

    def add(self, delta: generate_pb2.TokenDelta) -> None:
        """Counts a delta of the answer."""
        self.tokens += len(delta.token_ids)
        self.state = ""  # that it has begun follows from its tokens
        if delta.text:
            text = delta.text.encode()
            self.text_bytes += len(text)
            self.text_crc = crc32(text, self.text_crc)
        if delta.reasoning:
            reasoning = delta.reasoning.encode()
            self.reasoning_bytes += len(reasoning)
            self.reasoning_crc = crc32(reasoning, self.reasoning_crc)
        self.tool_calls += len(delta.tool_calls)

    def message(self, index: int) -> generate_pb2.AnswerPosition:
        """The same for ResumeGeneration."""
        return generate_pb2.AnswerPosition(
            index=index,
            tokens=self.tokens,
            text_bytes=self.text_bytes,
            reasoning_bytes=self.reasoning_bytes,
            tool_calls=self.tool_calls,
            is_finished=self.is_finished,
        )


@dataclass(frozen=True, slots=True)
class EventId:
    """One id, as a client sends it."""

    handle: str
    origin: Origin
    positions: Sequence[Position]

    @classmethod
    def parse(cls, text: str, most_answers: int) -> "EventId":
        """Reads the id of an event. Raises InvalidRequest naming the header."""
        parts = text.split(";")
        try:
            if len(parts) != 3 or parts[2].count("/") >= most_answers:
                raise ValueError("of other parts")
            Handle.parse(parts[0])
            return cls(parts[0], Origin.parse(parts[1]), [Position.parse(one) for one in parts[2].split("/")])
        except (ValueError, InvalidRequest):
            raise InvalidRequest.of(HEADER, "is not the id of an event of this API") from None

    def require_request(self, request_crc: int) -> None:
        """Raises InvalidRequest if the id is of the answer to another request."""
        if self.origin.request_crc != request_crc:
            raise InvalidRequest.of(HEADER, "is of another request: send the same body to the same path")


class EventIds:
    """Makes the ids of a stream's events, as they are written."""

    def __init__(self, origin: Origin, num_answers: int, had: Iterable[Position] = ()) -> None:
        self.origin = origin
        self.positions = [replace(position) for position in had]
        self.positions += [Position() for _ in range(num_answers - len(self.positions))]
        self._head = ""

    def start(self, started: generate_pb2.Started) -> None:
        """Notes the handle; without one no event gets an id."""
        given = started.resumption
        if given.handle:
            self.origin = replace(self.origin, seed=given.seed)
            self._head = f"{given.handle};{self.origin.text};"

    def line(self) -> bytes:
        """The line that tells what the client has with this event, and the end of the event."""
        if not self._head:
            return b"\n"
        return f"id: {self._head}{'/'.join(one.text for one in self.positions)}\n\n".encode()
