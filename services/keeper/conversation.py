"""The keeper's side of its conversation with one worker: what it asks to be kept, and its signs of life."""

import socket
from collections.abc import Sequence
from contextlib import suppress

from runtime.clock import monotonic
from services.keeper.memory import KeptDescriptors, SuccessorsMemory
from services.keeper.messages import Answer, KeeperLost, Packet, Request, receive, send
from services.keeper.silence import Silence

# A worker that does not even say how long its start may take.
_SILENT_SECONDS = 300.0
# A worker that has given no sign of life for so long is looked at, so often.
_LOOK_SECONDS = 1.0


class Conversation:
    """Obeys a worker at the other end of `own`, the process `pid`."""

    def __init__(self, own: socket.socket, kept: KeptDescriptors | SuccessorsMemory, hello: Answer, pid: int) -> None:
        self._socket, self._kept, self._hello = own, kept, hello
        self._patience: float | None = None  # between two beats, once it is ready
        self._ready_by = monotonic() + _SILENT_SECONDS
        self._silence = Silence(pid)
        self._began: float | None = None
        self._beat_at = self._look_at = 0.0
        self._look_every = _LOOK_SECONDS
        self._waiting: Request | None = None
        self._start_seconds = _SILENT_SECONDS
        self.wants_upgrade = self.wants_standby = False

    @property
    def sources(self) -> Sequence[int]:
        """The descriptor that is readable once the worker has asked something; none after the end."""
        number = self._socket.fileno()
        return [] if number < 0 else [number]

    @property
    def look_seconds(self) -> float | None:
        """The seconds until `looks_hung` may become true; None after the end."""
        if self._socket.fileno() < 0:
            return None
        return max(0.0, (self._ready_by if self._patience is None else self._look_at) - monotonic())

    def looks_hung(self) -> bool:
        """True if the worker counts as hung."""
        if self._socket.fileno() < 0 or self._patience is None:
            return self._socket.fileno() >= 0 and monotonic() >= self._ready_by
        if monotonic() >= self._look_at:
            # Not what has passed: a keeper that was suspended, perhaps with the worker, has not seen it silent.
            self._silence.add(self._look_every)
            self._look_at = monotonic() + self._look_every
        return self._silence.seconds >= self._patience

    @property
    def complaint(self) -> str:
        """The step that it has failed to do."""
        if self._patience is None:
            return "the worker has not become ready in time"
        return f"the worker has not given a sign of life for {monotonic() - self._beat_at:.1f} s"

    @property
    def was_ready(self) -> bool:
        """True if it was ready once."""
        return self._began is not None

    @property
    def beaten_seconds(self) -> float:
        """The seconds during which it has given signs of life after its start; 0 before it was ready."""
        return 0.0 if self._began is None else self._beat_at - self._began

    def serve(self) -> None:
        """Does what the worker asks, and answers."""
        try:
            packet = receive(self._socket)
            try:
                self._obey(Request(**packet.content), packet)
            finally:
                packet.close()
        except (KeeperLost, TypeError):
            # It is about to die; or it is no worker of this version, and lives on without its keeper.
            self.close()

    def close(self) -> None:
        """Ends the conversation; a worker that is alive takes it for the keeper's end."""
        self._socket.close()

    def answer_upgrade(self, problem: str) -> None:
        """Tells the worker that it is to end between two steps, for its successor is ready; or why it is not."""
        self.wants_upgrade = False
        with suppress(KeeperLost):
            send(self._socket, Answer(problem=problem))

    def _hear(self) -> None:
        """It has given a sign of life."""
        self._beat_at = monotonic()
        self._look_at = self._beat_at + self._look_every
        self._silence.end()

    def go_on(self, ended_at: float, ended_by: str) -> None:
        """Answers the request of a successor that has waited until the worker ended, which may have been for long."""
        assert self._waiting is not None
        self._ready_by = monotonic() + self._start_seconds
        with suppress(KeeperLost):
            self._get(self._waiting, ended_at, ended_by)

    def _get(self, request: Request, ended_at: float = 0.0, ended_by: str = "") -> None:
        found = self._kept.get(request.name, request.fingerprint)
        if found is None:
            self._waiting = request
            return
        answer = Answer(bool(found.descriptors), found.stale, ended_by=ended_by, ended_at=ended_at)
        send(self._socket, answer, found.descriptors)

    def _obey(self, request: Request, packet: Packet) -> None:
        match request.verb:
            case "beat":
                self._hear()
            case "start":
                self._start_seconds = request.seconds
                self._ready_by = monotonic() + request.seconds
            case "standby":
                self.wants_standby = True
            case "watch":
                self._patience, self._look_every = request.seconds, min(_LOOK_SECONDS, request.seconds)
                self._hear()
                self._began = self._beat_at
            case "hello":
                send(self._socket, self._hello)
            case "get":
                self._get(request)
            case "put":
                self._kept.put(request.name, request.fingerprint, packet.pop_descriptors())
                send(self._socket, Answer(is_kept=True))
            case "drop":
                self._kept.drop(request.name)
                send(self._socket, Answer())
            case "upgrade":
                self.wants_upgrade = True
                send(self._socket, Answer())
