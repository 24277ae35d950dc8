"""Answers that go on after the loss of a connection or a router: what a client has, and how it asks for the rest."""

import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from baton.connection.retry import Resume
from baton.connection.routers import Routers
from baton.connection.settings import Settings
from baton.errors import BatonError, EmbeddingLost, InvalidReply, Unavailable
from baton.generation.requests import GenerateCall
from baton.inference.v1 import generate_pb2

# Of the calls that resume an answer: the first is made at once, later ones after growing pauses.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0
# A stream that is silent for so many of its usual gaps, and at least so long, is unusual.
_GAPS, _SHORTEST_SECONDS = 2.0, 0.15
# The least time between two looks at a stream.
_LOOK_SECONDS = 0.02
# What counts after each further message of the longest gap, and of the patience that a change of router teaches.
_REMEMBERED, _TAUGHT = 0.9, 0.98
# A program that wakes up so late has not read what has come.
_HELD_UP_SECONDS = 0.05
_UNUSED = Resume()


class Silence:
    """The silence of one answer's stream, and when it is worth a question."""

    def __init__(self, resume: Resume) -> None:
        self.heard_at = time.monotonic()
        self._longest = resume.silent_seconds
        self._shortest = _SHORTEST_SECONDS
        self._gap: float | None = None
        self._due_seconds = self._longest  # after `heard_at`

    @property
    def seconds(self) -> float:
        """The seconds since its last message."""
        return time.monotonic() - self.heard_at

    @property
    def look_seconds(self) -> float:
        """The time until the next look at it: a token that comes meanwhile makes a question due earlier."""
        return min(_SHORTEST_SECONDS, max(_LOOK_SECONDS, self.seconds_until_due))

    @property
    def seconds_until_due(self) -> float:
        """The time until a question is due; not above 0 if it is."""
        return self._due_seconds - self.seconds

    def hear(self, *, is_token: bool) -> None:
        """A message has come."""
        now = time.monotonic()
        if is_token:
            # The first gap is that to the first token, which takes as long as the prompt does.
            self._gap = 0.0 if self._gap is None else max(now - self.heard_at, _REMEMBERED * self._gap)
            self._shortest = max(_SHORTEST_SECONDS, _TAUGHT * self._shortest)
            self._due_seconds = min(self._longest, max(self._shortest, _GAPS * self._gap)) * random.uniform(1.0, 1.2)
        self.heard_at = now

    def postpone(self) -> None:
        """Nothing was found: the next question is due after as long a time once more."""
        self._due_seconds = self.seconds + min(self._longest, self.seconds)

    def was_held_up(self, seconds: float) -> bool:
        """True if this program woke up so many seconds late, and so cannot tell who is silent."""
        return seconds > _HELD_UP_SECONDS and self.seconds < self._longest

    def move(self) -> None:
        """Another router is asked for the answer, and has its time."""
        self._gap = None
        self._due_seconds = self.seconds + self._longest

    def leave(self) -> None:
        """The router is left for its silence: streams for which that happens often become more patient."""
        self._shortest = min(self._longest, 2.0 * self._shortest)


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
        self.silence = Silence(resume or _UNUSED)
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
        self.silence.move()
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
        self._failures, kind = 0, event.WhichOneof("event")
        self.silence.hear(is_token=kind == "token")
        match kind:
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
        if not self.is_resumable or self._resume is None or not _is_lost(error):
            return None
        pause = 0.0
        if self._failures:
            pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** (self._failures - 1))
        self._failures += 1
        if self.silence.seconds + pause > max(self._resume.keep_seconds, self._resume.stall_seconds + 2.0):
            return None
        return pause if seconds_left is None or pause < seconds_left else None

    @property
    def is_resumable(self) -> bool:
        """True if a router could go on with it."""
        return bool(self.handle) and not self.is_complete

    def is_behind(self, progress: generate_pb2.GetGenerationProgressResponse) -> bool:
        """True if the answers' workers have more of them than has come."""
        return any(self._lacks(one) for one in progress.answers)

    def _lacks(self, progress: generate_pb2.AnswerProgress) -> bool:
        answer = self._answers.get(progress.index)
        if answer is None:
            return progress.tokens > 0 or progress.is_over
        position = answer.position
        return progress.tokens > position.tokens or (progress.is_over and not position.is_finished)

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


class StreamedAnswer:
    """The parts of an answer that do not depend on who reads it. `stop` ends one that goes on without its reader."""

    def __init__(self, routers: Routers, settings: Settings, made: GenerateCall, stop: Callable[[str], None]) -> None:
        self.request_id = made.request.request_id
        self.trace_id = ""
        self._routers = routers
        self._settings = settings
        self._received = Received(made.request, settings.resume, made.handle)
        self._stop = stop
        self._is_lost = False
        self._running: Any = None  # the present call

    def __repr__(self) -> str:
        return f"<baton.{type(self).__name__} request_id={self.request_id!r} trace_id={self.trace_id!r}>"

    @property
    def resumptions(self) -> int:
        """The number of times that a router took the answer over."""
        return self._received.resumptions

    @property
    def recomputations(self) -> int:
        """The number of these at which the prompt was computed again, since no worker had the answer any more."""
        return self._received.recomputations

    @property
    def handle(self) -> str:
        """A secret by which any router goes on with the answer; empty if it cannot be resumed."""
        return self._received.handle


def _is_lost(error: BatonError) -> bool:
    """True if the connection or the router is lost, or what it gave cannot be read; not if the request is refused."""
    return isinstance(error, (Unavailable, EmbeddingLost, InvalidReply)) or type(error) is BatonError
