"""The keeper's side of its conversation with one worker: what it asks to be kept, and its signs of life."""

import socket
from collections.abc import Sequence

from runtime.clock import monotonic
from services.keeper.memory import KeptDescriptors
from services.keeper.messages import Answer, KeeperLost, Packet, Request, receive, send

# A worker that does not even say how long its start may take.
_SILENT_SECONDS = 300.0


class Conversation:
    """Obeys a worker at the other end of `own`."""

    def __init__(self, own: socket.socket, kept: KeptDescriptors, hello: Answer) -> None:
        self._socket, self._kept, self._hello = own, kept, hello
        self._patience: float | None = None  # between two beats, once it is ready
        self._ready_by = monotonic() + _SILENT_SECONDS
        self._began: float | None = None
        self._beat_at = 0.0

    @property
    def sources(self) -> Sequence[int]:
        """The descriptor that is readable once the worker has asked something; none after the end."""
        number = self._socket.fileno()
        return [] if number < 0 else [number]

    @property
    def seconds_left(self) -> float | None:
        """The time until it counts as hung, unless it beats or becomes ready; None after the end."""
        if self._socket.fileno() < 0:
            return None
        return (self._ready_by if self._patience is None else self._beat_at + self._patience) - monotonic()

    @property
    def complaint(self) -> str:
        """The step that it has failed to do, once no time is left."""
        if self._patience is None:
            return "the worker has not become ready in time"
        return f"the worker has not given a sign of life for {monotonic() - self._beat_at:.1f} s"

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

    def _obey(self, request: Request, packet: Packet) -> None:
        match request.verb:
            case "beat":
                self._beat_at = monotonic()
            case "start":
                self._ready_by = monotonic() + request.seconds
            case "watch":
                self._patience = request.seconds
                self._began = self._beat_at = monotonic()
            case "hello":
                send(self._socket, self._hello)
            case "get":
                found = self._kept.get(request.name, request.fingerprint)
                send(self._socket, Answer(is_kept=bool(found.descriptors), stale=found.stale), found.descriptors)
            case "put":
                self._kept.put(request.name, request.fingerprint, packet.pop_descriptors())
                send(self._socket, Answer(is_kept=True))
            case "drop":
                self._kept.drop(request.name)
                send(self._socket, Answer())
