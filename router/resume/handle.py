"""The handle of a kept answer: the id of its first decode, a secret, and a hint at its worker.

Keeping of answers: a request's `keep`, and its client's part of the answers.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b, sha256

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2
from runtime.entropy import token_bytes

_VERSION = "b1."
_ID_BYTES = _SECRET_BYTES = 16
_HINT_BYTES = 4
_BYTES = _ID_BYTES + _SECRET_BYTES + _HINT_BYTES
_LENGTH = len(_VERSION) + len(urlsafe_b64encode(bytes(_BYTES)))


@dataclass(frozen=True, slots=True)
class Handle:
    """The handle of a kept answer. `call_id` is the id of its first answer on workers."""

    call_id: str
    secret: bytes
    hint: bytes = bytes(_HINT_BYTES)

    @classmethod
    def new(cls, call_id: str) -> "Handle":
        """A handle with a secret of its own."""
        return cls(call_id, token_bytes(_SECRET_BYTES))

    @classmethod
    def parse(cls, text: str) -> "Handle":
        """Reads what `text` has made. Raises InvalidRequest."""
        try:
            found = urlsafe_b64decode(text.removeprefix(_VERSION).encode())
        except (Error, ValueError):
            found = b""
        # What is not base64 is passed over: a handle has one text.
        if not text.startswith(_VERSION) or len(found) != _BYTES or len(text) != _LENGTH:
            raise InvalidRequest.of("handle", "is not one that Started.resumption gives")
        secret_at, hint_at = _ID_BYTES, _ID_BYTES + _SECRET_BYTES
        return cls(found[:secret_at].hex(), found[secret_at:hint_at], found[hint_at:])

    @property
    def text(self) -> str:
        """The handle as clients have it. Never logged, and in no trace."""
        return _VERSION + urlsafe_b64encode(bytes.fromhex(self.call_id) + self.secret + self.hint).decode()

    @property
    def secret_sha256(self) -> bytes:
        """The digest of the secret, which workers know."""
        return sha256(self.secret).digest()

    def at(self, worker_id: str) -> "Handle":
        """The same with a hint at a worker."""
        return replace(self, hint=_hint(worker_id))

    def hints_at(self, worker_id: str) -> bool:
        """True if this is the worker that had the answer when the handle was made, as far as can be told."""
        return self.hint == _hint(worker_id)


def answer_call_id(call_id: str, answer: int) -> str:
    """The id of an answer on workers, of several to one request; the first has the request's own id."""
    if not answer:
        return call_id
    return blake2b(f"{call_id}/{answer}".encode(), digest_size=_ID_BYTES).hexdigest()


def owner_sha256(caller: str, tenant: str) -> bytes:
    """Stands for the caller and the tenant that an answer belongs to."""
    return sha256(f"{caller}\0{tenant}".encode()).digest()


def _hint(worker_id: str) -> bytes:
    return blake2b(worker_id.encode(), digest_size=_HINT_BYTES).digest()


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
