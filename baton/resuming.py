"""Answers that go on after the loss of a connection or a router: what a client has, and how it asks for the rest."""

import time
from array import array
from dataclasses import dataclass, field

from google.protobuf.message import Message

from baton.connection.retry import Resume
from baton.errors import BatonError, EmbeddingLost, InvalidReply, Unavailable
from baton.inference.v1 import generate_pb2

# Of the calls that resume an answer: the first is made at once, later ones after growing pauses.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0


@dataclass(slots=True)
class _Answer:
    """The received part of one answer."""

    position: generate_pb2.AnswerPosition
    ids: "array[int]" = field(default_factory=lambda: array("I"))


class Received:
    """The received parts of the answers to one request, over all of its streams: sums, and the ids.

    Without `resume` nothing is kept, and the request is the one that was given.
    """

    def __init__(self, request: generate_pb2.GenerateRequest, resume: Resume | None, handle: str = "") -> None:
        self.request = request
        self.handle = handle  # of a secret: empty unless the answer can be resumed
        self.resumptions = self.recomputations = 0
        self.is_complete = False
        self.heard_at = time.monotonic()
        self._resume = resume
        # Another process may have counted before.
        self._attempt = int(time.time()) if handle else 0
        self._has_copy = not handle
        self._failures = 0
        self._sequence = 0
        self._answers: dict[int, _Answer] = {}
        if resume is not None and not handle and not request.response.HasField("keep"):
            self.request = generate_pb2.GenerateRequest()
            self.request.CopyFrom(request)
            self.request.response.keep.FromNanoseconds(int(resume.keep_seconds * 1e9))

    def next_call(self) -> tuple[str, Message]:
        """The method and the message of the next call: the request, or what resumes it."""
        if not self.handle:
            return "InferenceService/Generate", self.request
        self._attempt += 1
        asked = generate_pb2.ResumeGenerationRequest(
            handle=self.handle, attempt=self._attempt, have=[one.position for one in self._answers.values()]
        )
        if self._has_copy:
            asked.request.CopyFrom(self.request)
        for index in range(max(self._answers, default=-1) + 1):
            asked.received.add(ids=self._answers[index].ids if index in self._answers else ())
        return "InferenceService/ResumeGeneration", asked

    def add(self, event: generate_pb2.GenerateResponse) -> bool:
        """Counts a message. False for one that only tells that the answer goes on; others are numbered on."""
        self.heard_at, self._failures = time.monotonic(), 0
        match event.WhichOneof("event"):
            case "started":
                self._note(event.started)
            case "resumed":
                self.resumptions += 1
                self.recomputations += event.resumed.recomputed
                self._note(event.resumed.started)
                return False
            case "token":
                self._add(event.token)
            case "answer_finished":
                self._answer(event.answer_finished.index).position.is_finished = True
            case "finished":
                self.is_complete = True
        event.sequence = self._sequence
        self._sequence += 1
        return True

    def pause_after(self, error: BatonError, seconds_left: float | None) -> float | None:
        """Seconds to wait before the answer is resumed; None if it is not, and the error has to be raised."""
        if not self.handle or self._resume is None or self.is_complete or not _is_lost(error):
            return None
        pause = 0.0
        if self._failures:
            pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** (self._failures - 1))
        self._failures += 1
        if time.monotonic() + pause - self.heard_at > max(self._resume.keep_seconds, self._resume.stall_seconds + 2.0):
            return None
        return pause if seconds_left is None or pause < seconds_left else None

    def is_silent(self) -> bool:
        """True if nothing has come for so long that the router may be lost."""
        return (
            self._resume is not None
            and bool(self.handle)
            and not self.is_complete
            and time.monotonic() - self.heard_at > self._resume.silent_seconds
        )

    def _note(self, started: generate_pb2.Started) -> None:
        given = started.resumption
        if given.handle:
            self.handle = given.handle
            self.request.sampling.seed = given.seed

    def _answer(self, index: int) -> _Answer:
        if index not in self._answers:
            self._answers[index] = _Answer(generate_pb2.AnswerPosition(index=index))
        return self._answers[index]

    def _add(self, token: generate_pb2.TokenDelta) -> None:
        answer = self._answer(token.index)
        position = answer.position
        position.tokens += len(token.token_ids)
        position.text_bytes += len(token.text.encode())
        position.reasoning_bytes += len(token.reasoning.encode())
        position.tool_calls += len(token.tool_calls)
        answer.ids.extend(token.token_ids)


def _is_lost(error: BatonError) -> bool:
    """True if the connection or the router is lost, or what it gave cannot be read; not if the request is refused."""
    return isinstance(error, (Unavailable, EmbeddingLost, InvalidReply)) or type(error) is BatonError
