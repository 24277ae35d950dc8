"""Runs the worker as a child, again and again, and holds what it asks to be kept."""

import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from runtime.clock import monotonic
from services.keeper.child import Child, Ending
from services.keeper.conversation import Conversation
from services.keeper.memory import KeptDescriptors
from services.keeper.messages import Answer, pair

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A worker that has lived for so long since its first beat has started well.
_PROVEN_SECONDS = 30.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 10.0
# What is kept may be what kills the worker: it is freed after so many failures in a row, KV first.
_SUSPECTS = {3: "kv", 6: "weights"}
_MOST_FAILURES = 9
_WRONG_CONFIGURATION = 2
_NOT_STARTED = Ending(126)


class Keeper:
    """Starts `command`, and starts it again when it is killed, fails or hangs."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._kept = KeptDescriptors()
        self._starts = self._failures = 0
        self._ended_at = 0.0
        self._last: Ending | None = None
        self._is_stopping = False

    def run(self) -> int:
        """Runs workers, one at a time, until one ends for good. Returns the exit code.

        That is a worker that ended without an error, was told to stop, or found its configuration wrong; and one that
        has failed too often in a row.
        """
        with _signals() as signals:
            while True:
                life = self._start(signals)
                ending = life.live() if life else _NOT_STARTED
                self._is_stopping |= life is not None and life.is_stopping
                if self._is_final(ending):
                    return ending.exit_code
                self._note_failure(ending, proven=life is not None and life.proven)
                if self._failures > _MOST_FAILURES or self._is_told_to_stop(signals):
                    return ending.exit_code

    def _start(self, signals: socket.socket) -> "_Life | None":
        """Starts a worker; None if the system has no room for a process, or the program is not there."""
        try:
            return _Life(self._command, self._kept, self._hello(), signals)
        except OSError as error:
            say(f"the worker cannot be started: {error}")
            return None

    def _is_final(self, ending: Ending) -> bool:
        return self._is_stopping or ending.code in (0, _WRONG_CONFIGURATION)

    def _hello(self) -> Answer:
        self._starts += 1
        if self._last is None:
            return Answer()
        return Answer(starts=self._starts - 1, ended_by=self._last.cause, ended_at=self._ended_at)

    def _note_failure(self, ending: Ending, *, proven: bool) -> None:
        self._last, self._ended_at = ending, monotonic()
        self._failures = 1 if proven else self._failures + 1
        say(f"the worker {ending}; it keeps {', '.join(self._kept.names) or 'nothing'}")
        suspect = _SUSPECTS.get(self._failures)
        if suspect is not None and self._kept.drop(suspect):
            say(f"kept {suspect} freed: the worker has failed {self._failures} times in a row")

    def _is_told_to_stop(self, signals: socket.socket) -> bool:
        """Waits before the next start: not after the first failure, and longer after each. True if told to stop."""
        if self._failures < 2:
            return False
        seconds = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (self._failures - 2))
        say(f"starting the worker again in {seconds:g} s")
        return bool(select.select([signals], [], [], seconds)[0])


class _Life:
    """One worker, from its start to its death."""

    def __init__(self, command: Sequence[str], kept: KeptDescriptors, hello: Answer, signals: socket.socket) -> None:
        self._signals = signals
        own, end = pair()
        try:
            with end:
                self._child = Child(command, end)
        except OSError:
            own.close()
            raise
        self._worker = Conversation(own, kept, hello, self._child.pid)
        self._hung = self.is_stopping = False

    @property
    def proven(self) -> bool:
        """True if it has beaten for long enough to have started well."""
        return self._worker.beaten_seconds > _PROVEN_SECONDS

    def live(self) -> Ending:
        """Serves the worker until it is dead: until then no other one may start."""
        while self._turn():
            pass
        self._worker.close()
        return self._child.wait(hung=self._hung)

    def _turn(self) -> bool:
        """Waits for the next thing to happen, and does it. False once the worker is dead."""
        sources = [self._child.pidfd, self._signals.fileno(), *self._worker.sources]
        seconds = None if self._hung else self._worker.look_seconds
        ready = select.select(sources, [], [], seconds)[0]
        if self._child.pidfd in ready:
            return False
        if self._signals.fileno() in ready:
            self.is_stopping = True
            for number in self._signals.recv(64):
                self._child.send(number)
        elif ready:
            self._worker.serve()
        elif seconds is not None and self._worker.looks_hung(seconds):
            say(f"{self._worker.complaint}: killing it")
            self._hung = True
            self._child.send(signal.SIGKILL)
        return True


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Yields a socket from which the numbers of signals can be read, one byte each."""
    reads, writes = socket.socketpair()
    writes.setblocking(False)
    with reads, writes:
        signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
        # Where a parent has had it ignored, the kernel forgets how children end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in _SIGNALS:
            # A worker, too, leaves SIGHUP alone, which nohup has had ignored; it handles the others always.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _nothing)
        try:
            yield reads
        finally:
            signal.set_wakeup_fd(-1)


def _nothing(_number: int, _frame: object) -> None:
    """The number is read from the socket."""


def say(words: str) -> None:
    """Writes one line to stderr; nobody need read it."""
    try:
        print(f"keeper: {words}", file=sys.stderr, flush=True)
    except OSError:
        return


def replace_this_process(arguments: Sequence[str]) -> NoReturn:
    """Becomes the keeper of a worker with these arguments."""
    os.execv(sys.executable, [sys.executable, "-m", "services.keeper", *arguments])
