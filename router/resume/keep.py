"""Keeping of answers: a request's `keep`, and its client's part of the answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.inference.v1 import generate_pb2
from router.resume.handle import Handle


@dataclass(frozen=True, slots=True)
class Continued:
    """The client's part of one answer: sums, and the ids if it sends them."""

    have: generate_pb2.AnswerPosition
    received: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Keep:
    """The grace of a request's answers without their client, and their handle.

    `continued` has what the client has of each answer, if it resumes them; `attempt` counts how often, and is None for
    a new request.
    """

    seconds: float
    handle: Handle
    attempt: int | None = None
    is_partly_lost: bool = False  # some of several answers are computed again
    origin: bytes = b""  # see ResumeRecord
    continued: Mapping[int, Continued] = field(default_factory=dict)

    @property
    def is_resumed(self) -> bool:
        """True for a request that goes on with answers."""
        return self.attempt is not None

    def of(self, answer: int) -> Continued:
        """The client's part of one answer."""
        return self.continued.get(answer) or Continued(generate_pb2.AnswerPosition(index=answer))


def keep_seconds(response: generate_pb2.ResponseOptions, most: float) -> float:
    """The granted seconds of `keep`; 0 if a request asks for nothing."""
    return min(most, max(0.0, response.keep.seconds + response.keep.nanos / 1e9))
