"""The worker's side: memory that outlives its process, and the sign that it lives."""

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from runtime.clock import monotonic
from services.keeper.memory import Found
from services.keeper.messages import VARIABLE, Answer, Packet, Request, receive, send

_ANSWER_SECONDS = 10.0
# For a successor to be ready: the keeper ends the wait, by the time that a start may take.
_SUCCESSION_SECONDS = 100_000.0


class KeeperClient:
    """Speaks to the keeper that started this process; safe on every thread. Its calls raise KeeperLost."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.settimeout(_ANSWER_SECONDS)
        self._signs = end.dup()
        self._signs.setblocking(False)
        self._lock = threading.Lock()
        self.start = Answer(**self._ask(Request("hello")).content)
        if self.start.is_successor:
            self._end.settimeout(None)  # for its turn: the kernel ends it with its keeper

    @classmethod
    def of_this_process(cls) -> "KeeperClient | None":
        """The client of the keeper that has started this process; None without one. Call it once.

        Children of this process get neither the socket nor its number, by which they would take themselves for workers.
        """
        number = os.environ.pop(VARIABLE, "")
        if not number.isdecimal():
            return None
        os.set_inheritable(int(number), False)
        return cls(socket.socket(fileno=int(number)))

    def seconds_since_loss(self) -> float:
        """The time since the worker before this one ended."""
        return monotonic() - self.start.ended_at

    def get(self, name: str, fingerprint: str) -> Found:
        """Returns what is kept under this name with this fingerprint. What has another one is freed.

        The caller owns the descriptors. A successor waits here, for its turn.
        """
        packet = self._ask(Request("get", name, fingerprint))
        answer = Answer(**packet.content)
        if answer.ended_at:
            self._end.settimeout(_ANSWER_SECONDS)
            self.start = replace(self.start, ended_at=answer.ended_at, ended_by=answer.ended_by or self.start.ended_by)
        return Found(tuple(packet.pop_descriptors()), answer.stale)

    def put(self, name: str, fingerprint: str, descriptors: Sequence[int]) -> None:
        """Has the keeper hold duplicates of these descriptors, in the place of what it holds under this name."""
        self._ask(Request("put", name, fingerprint), descriptors)

    def drop(self, name: str) -> None:
        """Has the keeper free what it holds under this name."""
        self._ask(Request("drop", name))

    def upgrade(self) -> str:
        """Has the keeper start the worker's next process, by the code and configuration of now, beside this one.

        Returns once it waits for this one to end, within seconds, between two steps: then ''; or why there is none.
        """
        with self._lock:
            send(self._end, Request("upgrade"))
            receive(self._end)  # in time, unless the keeper is older than its worker
            self._end.settimeout(_SUCCESSION_SECONDS)
            try:
                return Answer(**receive(self._end).content).problem
            finally:
                self._end.settimeout(_ANSWER_SECONDS)

    def begin(self, seconds: float) -> None:
        """Has the keeper kill this process if it does not call `watch` in this time."""
        with self._lock:
            send(self._end, Request("start", seconds=seconds))

    def watch(self, seconds: float) -> None:
        """Has the keeper kill this process once it has not called `beat` for so long."""
        with self._lock:
            send(self._end, Request("watch", seconds=seconds))

    def stand_by(self) -> None:
        """Has the keeper start the worker's next process beside this one, to take over when this one dies."""
        with self._lock:
            send(self._end, Request("standby"))

    def beat(self) -> None:
        """Tells that this process lives. Never waits: a keeper that is behind has signs enough to read."""
        with suppress(BlockingIOError):
            send(self._signs, Request("beat"))

    def close(self) -> None:
        """Closes the socket."""
        self._signs.close()
        self._end.close()

    def _ask(self, request: Request, descriptors: Sequence[int] = ()) -> Packet:
        with self._lock:
            send(self._end, request, descriptors)
            return receive(self._end)
