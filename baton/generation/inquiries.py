"""Routers that say nothing: how a client tells a lost one from a slow engine.

Once the stream of a kept answer has been silent for longer than is usual, its client asks the router a question. If it
is not answered, the client asks another router how far the answer is: if its worker has tokens that have not come, the
router is lost, or its connection. Streams of one router that ask at the same time ask once.
"""

import enum
import time
from collections.abc import Generator
from dataclasses import dataclass

from google.protobuf.message import Message

from baton.connection.retry import Resume
from baton.errors import BatonError, DeadlineExceeded, Unavailable
from baton.generation.resuming import Received
from baton.inference.v1 import generate_pb2, server_info_pb2

# The time for the answer to a question is so many round trips, and at least this; or the second, where none is known.
_ROUND_TRIPS, _LEAST_SECONDS, _UNKNOWN_SECONDS = 3.0, 0.1, 0.3
# For so long a router that was found to be lost is left by its other silent streams, too.
_LOST_SECONDS = 0.5


class Finding(enum.Enum):
    """The answer of one stream's questions: whether its router is lost."""

    ANSWERS = enum.auto()
    LOST = enum.auto()
    SILENT = enum.auto()  # as far as this stream can tell


@dataclass(frozen=True, slots=True)
class Question:
    """A call of a router by its number, and the time that it has to answer."""

    router: int
    method: str
    message: Message
    seconds: float


# What a question brings: a message, or an error.
Reply = Message | BatonError


class Inquiries:
    """The rule by which a client finds out that a router is lost, without the calls themselves."""

    def __init__(self, resume: Resume, routers: int) -> None:
        self._resume = resume
        self._routers = routers
        self._round_trips: dict[int, float] = {}  # the shortest of each router
        self._lost_at: dict[int, float] = {}

    def knows(self, router: int) -> bool:
        """True if it is known how long this router takes to answer."""
        return router in self._round_trips

    def meet(self, router: int) -> Generator[Question, Reply, bool]:
        """Learns how long a router takes to answer, by a first question, which may have to connect, and a second."""
        first = yield from self._answers(router, self._resume.question_seconds)
        return first and (yield from self._answers(router, self._resume.question_seconds))

    def is_known_lost(self, router: int, received: Received) -> bool:
        """True if another stream has just found out that a router is lost, since this one was last heard."""
        lost_at = self._lost_at.get(router, float("-inf"))
        return lost_at > received.silence.heard_at and time.monotonic() - lost_at < _LOST_SECONDS

    def ask(self, router: int, received: Received) -> Generator[Question, Reply, Finding]:
        """Finds out whether a router has to be left, by a stream of it that is silent."""
        if (yield from self._answers(router, self._patience_seconds(router))):
            return Finding.ANSWERS
        if not (yield from self._is_behind(router, received)):
            if received.silence.seconds < self._resume.silent_seconds:
                return Finding.SILENT
            if (yield from self._answers(router, self._resume.question_seconds)):
                return Finding.ANSWERS
        self._lost_at[router] = time.monotonic()
        return Finding.LOST

    def _is_behind(self, router: int, received: Received) -> Generator[Question, Reply, bool]:
        if self._routers == 1:
            return False
        asked = generate_pb2.GetGenerationProgressRequest(handle=received.handle)
        method, another = "InferenceService/GetGenerationProgress", (router + 1) % self._routers
        reply = yield Question(another, method, asked, self._resume.question_seconds)
        return isinstance(reply, generate_pb2.GetGenerationProgressResponse) and received.is_behind(reply)

    def _answers(self, router: int, seconds: float) -> Generator[Question, Reply, bool]:
        began = time.monotonic()
        reply = yield Question(
            router, "InferenceService/GetServerInfo", server_info_pb2.GetServerInfoRequest(), seconds
        )
        if isinstance(reply, (Unavailable, DeadlineExceeded)):
            return False
        took = time.monotonic() - began
        self._round_trips[router] = min(took, self._round_trips.get(router, took))
        return True

    def _patience_seconds(self, router: int) -> float:
        known = self._round_trips.get(router)
        seconds = _UNKNOWN_SECONDS if known is None else max(_LEAST_SECONDS, _ROUND_TRIPS * known)
        return min(self._resume.question_seconds, seconds)
