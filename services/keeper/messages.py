"""The messages between a worker and its keeper: one packet each, of JSON, with file descriptors beside it.

The worker asks, and the keeper answers: `hello`, `get`, `put` and `drop`, and `upgrade` twice: at once, and
once that is decided. `start`, `watch`, `standby` and `beat` have no answer. `fork` is the keeper's to a fork server.
"""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

VARIABLE = "BATON_KEEPER_FD"
"""The environment variable by which a worker finds the socket of its keeper."""

_MOST_BYTES = 64 * 1024
_MOST_DESCRIPTORS = 64

Verb = Literal["hello", "get", "put", "drop", "upgrade", "start", "watch", "standby", "beat", "fork"]


class KeeperLost(Exception):
    """The other end of the socket has gone, or is not a keeper."""


@dataclass(frozen=True, slots=True)
class Request:
    """`name` and `fingerprint` are of kept memory; `seconds` is the longest time that a start takes, or
    passes between two beats, of `watch`.
    """

    verb: Verb
    name: str = ""
    fingerprint: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to `get` says whether memory of the name `is_kept`; `stale` is the fingerprint of memory that had to
    be freed instead. That to `hello` says how often the worker was started before, and why and when, by the host's
    monotonic clock, the last one ended; a successor, started beside the last one, is told later why and when. The
    `problem` of an upgrade is why there is none. That to `fork` is the `pid` of the new process.
    """

    is_kept: bool = False
    stale: str = ""
    starts: int = 0
    ended_by: str = ""
    ended_at: float = 0.0
    is_successor: bool = False
    problem: str = ""
    pid: int = 0


@dataclass(slots=True)
class Packet:
    """A message that arrived. Its receiver owns the descriptors."""

    content: dict[str, Any]
    descriptors: list[int] = field(default_factory=list)

    def pop_descriptors(self) -> list[int]:
        """Gives the descriptors away."""
        descriptors, self.descriptors = self.descriptors, []
        return descriptors

    def close(self) -> None:
        """Closes the descriptors."""
        for each in self.pop_descriptors():
            os.close(each)


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends, of the keeper and of a worker."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(to: socket.socket, message: Request | Answer, descriptors: Sequence[int] = ()) -> None:
    """Sends one message. Raises KeeperLost, and BlockingIOError if it would have to wait and may not."""
    try:
        # Without what says nothing: the other end may be older, and not know it.
        content = {name: value for name, value in asdict(message).items() if value}
        socket.send_fds(to, [json.dumps(content).encode()], list(descriptors))
    except BlockingIOError:
        raise
    except OSError as error:
        raise KeeperLost(str(error)) from error


def receive(source: socket.socket) -> Packet:
    """Receives one message. Raises KeeperLost at the end, and for what is no message."""
    try:
        content, descriptors, flags, _ = socket.recv_fds(source, _MOST_BYTES, _MOST_DESCRIPTORS)
    except OSError as error:
        raise KeeperLost(str(error)) from error
    for each in descriptors:
        os.set_inheritable(each, False)
    packet = Packet({}, descriptors)
    try:
        if not content or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise KeeperLost("the other end has gone" if not content else "a message that is too long")
        return Packet(json.loads(content), descriptors)
    except (ValueError, KeeperLost) as error:
        packet.close()
        raise KeeperLost(str(error)) from error
