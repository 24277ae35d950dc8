"""One process of the worker: its start, its signals, and its certain death."""

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from services.keeper.fork_server import die_with
from services.keeper.messages import VARIABLE


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a worker: its exit code, negative for the number of a signal."""

    code: int
    hung: bool = False

    @property
    def exit_code(self) -> int:
        """The code with which a shell would have ended: 128 and the signal's number for a signal."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def cause(self) -> str:
        """The reason for its end, in one word: hang, the signal's name, or exit."""
        if self.hung:
            return "hang"
        return _name(-self.code) if self.code < 0 else "exit"

    def __str__(self) -> str:
        if self.hung:
            return "hung, and was killed"
        return f"was killed by {self.cause}" if self.code < 0 else f"ended with exit code {self.code}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


class Child:
    """A running worker. `pidfd` is readable once it is dead: with all its threads, and its files closed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # The process is not waited for before `wait`, so that its id is not another's.
        self.pidfd = os.pidfd_open(pid)

    def send(self, number: int) -> None:
        """Sends a signal; none to a process that is dead."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return

    def wait(self, *, hung: bool) -> Ending:
        """Waits until it is dead, and returns how it ended. Call it once."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.pidfd)
        return Ending(code, hung and code == -signal.SIGKILL)


def start(command: Sequence[str], end: socket.socket) -> int:
    """Starts `command` with its end of a conversation, and returns its id. Raises OSError."""
    process = subprocess.Popen(
        command,
        pass_fds=[end.fileno()],
        env={**os.environ, VARIABLE: str(end.fileno())},
        # A session of its own: a terminal's Ctrl-C goes to the keeper alone, which passes it on once.
        start_new_session=True,
        preexec_fn=partial(die_with, os.getpid()),  # safe: the keeper has no threads
    )
    process.returncode = 0  # it is waited for by its id
    return process.pid
