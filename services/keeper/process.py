"""A process of the worker, and the keeper's conversation with it."""

import signal
import socket
from collections.abc import Callable, Collection

from runtime.clock import monotonic
from services.keeper.child import Child, Ending
from services.keeper.conversation import Conversation
from services.keeper.memory import KeptDescriptors, SuccessorsMemory
from services.keeper.messages import Answer, KeeperLost, pair

Start = Callable[[socket.socket], int]
"""Starts a process with this end of its conversation, and returns its id. Raises OSError or KeeperLost."""


class Process:
    """Starts a process. Raises what `start` does; one that comes all the same, and late, finds no keeper."""

    def __init__(self, start: Start, memory: KeptDescriptors | SuccessorsMemory, hello: Answer) -> None:
        own, end = pair()
        try:
            with end:
                self.child = Child(start(end))
        except (OSError, KeeperLost):
            own.close()
            raise
        self.worker = Conversation(own, memory, hello, self.child.pid)

    @property
    def sources(self) -> Collection[int]:
        """The descriptors of which one is readable once it has ended, or has asked something."""
        return [self.child.pidfd, *self.worker.sources]

    def wait(self, *, hung: bool) -> Ending:
        """Waits until it is dead, and returns how it ended. Call it once."""
        self.worker.close()
        return self.child.wait(hung=hung)


class Successor:
    """Starts a process beside the worker that it is to follow: it loads, and waits until it may take over."""

    def __init__(self, start: Start, kept: KeptDescriptors, hello: Answer) -> None:
        self._memory = SuccessorsMemory(kept)
        self.process = Process(start, self._memory, hello)

    @property
    def is_ready(self) -> bool:
        """True if it waits for the worker to end."""
        return self._memory.is_ready

    def serve(self, ready: Collection[int]) -> str:
        """Does what it asks. Returns why it cannot take over; empty if it may yet."""
        if self.process.child.pidfd in ready:
            return "the new process has ended; its log says why"
        self.process.worker.serve()
        return self._memory.problem

    def take_over(self, ended_by: str) -> Process:
        """The worker is dead: its successor owns what is kept."""
        self._memory.take_over()
        self.process.worker.go_on(monotonic(), ended_by)
        return self.process

    def discard(self) -> None:
        """Ends it."""
        self.process.child.send(signal.SIGKILL)
        self.process.wait(hung=False)
        self._memory.close()
