"""Runs the worker as a child, again and again, and holds what it asks to be kept."""

import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn, TypeVar

from runtime.clock import monotonic
from services.keeper.child import Ending, start
from services.keeper.fork_server import IMPORTS, adopt_orphans, fork, reap_adopted
from services.keeper.memory import KeptDescriptors
from services.keeper.messages import Answer, KeeperLost
from services.keeper.process import Process, Start, Successor

_Made = TypeVar("_Made", Process, Successor)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A worker that has lived for so long since its first beat has started well.
_PROVEN_SECONDS = 30.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 10.0
# What is kept may be what kills the worker: it is freed after so many failures in a row, KV first.
_SUSPECTS = {3: "kv", 6: "weights"}
_MOST_FAILURES = 9
# For a worker to end between two steps, once its next process is ready.
_END_SECONDS = 5.0
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
        adopt_orphans()
        with _signals() as signals:
            successor: Process | None = None
            while True:
                life = self._start(signals, successor)
                ending = life.live() if life else _NOT_STARTED
                reap_adopted(life.next_pid if life else None)
                self._is_stopping |= life is not None and life.is_stopping
                if life is not None and life.is_upgraded:
                    say("the worker has ended for its upgrade; its next process takes over")
                    successor = life.take_over("")
                    continue
                if self._is_over(ending, life, signals):
                    if life is not None:
                        life.discard_next()
                    return ending.exit_code
                successor = self._standby_of(life, ending) if life else None

    def _start(self, signals: socket.socket, successor: Process | None) -> "_Life | None":
        """Starts a worker unless there is a successor; None if there is no room for it, or no program."""
        try:
            process = successor
            if process is None:
                process = self._forked_or_started(partial(Process, memory=self._kept, hello=self._hello()))
        except OSError as error:
            say(f"the worker cannot be started: {error}")
            return None
        return _Life(process, signals, self._start_successor)

    def _start_successor(self, *, anew: bool) -> Successor:
        """Starts the next process: `anew` if it is to have the code and configuration of now."""
        self._starts += 1
        hello = Answer(starts=self._starts - 1, ended_by="upgrade", is_successor=True)
        make = partial(Successor, kept=self._kept, hello=hello)
        return make(self._start_anew) if anew else self._forked_or_started(make)

    def _start_anew(self, end: socket.socket) -> int:
        return start(self._command, end)

    def _forked_or_started(self, make: Callable[[Start], _Made]) -> _Made:
        """Makes a process that has imported its code already, if the worker has left one that can be forked.

        A fork server that hangs may fork later: that process has a conversation which has ended.
        """
        if server := self._kept.get(IMPORTS, "").descriptors:
            try:
                return make(partial(fork, server[0]))
            except KeeperLost as error:
                say(f"kept imports freed: {error}")
                self._kept.drop(IMPORTS)
        return make(self._start_anew)

    def _is_over(self, ending: Ending, life: "_Life | None", signals: socket.socket) -> bool:
        """True if no other process follows this one; notes its failure otherwise."""
        if self._is_final(ending):
            return True
        self._note_failure(ending, proven=life is not None and life.proven)
        # A process that is killed is so from outside; any other end may have its cause in what it was forked from.
        fails_alone = ending.cause != "SIGKILL" and (life is None or not life.was_ready)
        if fails_alone and self._kept.drop(IMPORTS):
            say("kept imports freed: the worker has failed before it was ready")
        return self._failures > _MOST_FAILURES or self._is_told_to_stop(signals)

    def _standby_of(self, life: "_Life", ending: Ending) -> Process | None:
        """The process that stood by, if it is to follow: it has what may be the cause of several failures."""
        if self._failures == 1:
            return life.take_over(ending.cause)
        life.discard_next()
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
    """One worker, from its start to its death; and its successor beside it: for an upgrade, or to stand by."""

    def __init__(self, process: Process, signals: socket.socket, start: Callable[..., Successor]) -> None:
        self._process, self._signals, self._start = process, signals, start
        self._next: Successor | None = None
        self._end_by: float | None = None  # of a worker whose successor is ready
        self._stands_by = False  # the successor: it follows a worker that is lost
        self._is_killed = self._hung = self.is_stopping = False

    @property
    def proven(self) -> bool:
        """True if it has beaten for long enough to have started well."""
        return self._process.worker.beaten_seconds > _PROVEN_SECONDS

    @property
    def was_ready(self) -> bool:
        """True if it was ready once."""
        return self._process.worker.was_ready

    @property
    def next_pid(self) -> int | None:
        """The process id of its successor, if there is one."""
        return self._next.process.child.pid if self._next is not None else None

    def live(self) -> Ending:
        """Serves the worker until it is dead: until then no other one may own what is kept."""
        while self._turn():
            pass
        if self._next is not None and not self._next.is_ready:
            self._give_up("the worker has ended before its successor was ready")
        return self._process.wait(hung=self._hung)

    @property
    def is_upgraded(self) -> bool:
        """True if it has ended for a successor that is ready."""
        return self._next is not None and not self._stands_by

    def take_over(self, ended_by: str) -> Process | None:
        """Its successor follows it, if there is one: it owns what is kept from now on."""
        return self._next.take_over(ended_by) if self._next is not None else None

    def discard_next(self) -> None:
        """Ends its successor, if there is one."""
        if self._next is not None:
            self._next.discard()

    def _turn(self) -> bool:
        """Waits for the next thing to happen, and does it. False once the worker is dead."""
        following = self._next.process.sources if self._next else ()
        ready = select.select([*self._process.sources, self._signals.fileno(), *following], [], [], self._seconds)[0]
        if self._process.child.pidfd in ready:
            return False
        if self._signals.fileno() in ready:
            self._pass_on(self._signals.recv(64))
        elif self._next is not None and not set(ready).isdisjoint(following):
            self._decide(self._next.serve(ready))
        elif ready:
            self._process.worker.serve()
            if self._process.worker.wants_upgrade and (self._next is None or self._stands_by):
                self._upgrade()
            elif self._process.worker.wants_standby:
                self._stand_by()
        if not self._is_killed:
            self._look()
        return True

    def _pass_on(self, signals: bytes) -> None:
        self.is_stopping = True
        if self._next is not None:
            self._give_up("the worker was told to stop")
        for number in signals:
            self._process.child.send(number)

    @property
    def _seconds(self) -> float | None:
        """The seconds until the keeper has to act without a message; None if nothing is due."""
        if self._is_killed:
            return None
        if self._end_by is not None:
            return max(0.0, self._end_by - monotonic())
        workers = [self._process.worker, *([self._loading.process.worker] if self._loading else [])]
        return min((each.look_seconds for each in workers if each.look_seconds is not None), default=None)

    @property
    def _loading(self) -> Successor | None:
        """Its successor, as long as that may hang: once it is ready it waits, as it should."""
        return None if self._next is None or self._next.is_ready else self._next

    def _look(self) -> None:
        worker = self._process.worker
        if self._end_by is not None:
            if monotonic() >= self._end_by:
                self._kill("the worker has not ended for its upgrade")
        elif worker.looks_hung():
            self._hung = True
            self._kill(worker.complaint)
        elif self._loading is not None and self._loading.process.worker.looks_hung():
            self._decide("the new process has not become ready in time")

    def _kill(self, reason: str) -> None:
        say(f"{reason}: killing it")
        self._is_killed = True
        self._process.child.send(signal.SIGKILL)

    # Its upgrade.

    def _upgrade(self) -> None:
        if self.is_stopping:
            self._process.worker.answer_upgrade("the worker was told to stop")
            return
        if self._next is not None:
            self._give_up("it is begun anew, for an upgrade")  # of the code and configuration of now
        try:
            self._next = self._start(anew=True)
        except OSError as error:
            self._process.worker.answer_upgrade(f"the new process cannot be started: {error}")

    def _stand_by(self) -> None:
        self._process.worker.wants_standby = False
        if self.is_stopping or self._next is not None:
            return
        try:
            self._next, self._stands_by = self._start(anew=False), True
        except OSError as error:
            say(f"no process stands by: {error}")

    def _decide(self, problem: str) -> None:
        """Has the worker end once its successor is ready; goes on with it if there is a problem."""
        if problem:
            self._give_up(problem)
        elif self._stands_by:
            return
        elif self._next is not None and self._next.is_ready and self._end_by is None:
            self._end_by = monotonic() + _END_SECONDS
            self._process.worker.answer_upgrade("")

    def _give_up(self, problem: str) -> None:
        assert self._next is not None
        say(f"{'no process stands by' if self._stands_by else 'no upgrade'}: {problem}")
        self._next.discard()
        if self._end_by is None and not self._stands_by:  # otherwise it has had its answer
            self._process.worker.answer_upgrade(problem)
        self._next = self._end_by = None
        self._stands_by = False


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
    """Writes one line to stderr, if it is open."""
    try:
        print(f"keeper: {words}", file=sys.stderr, flush=True)
    except OSError:
        return


def replace_this_process(arguments: Sequence[str]) -> NoReturn:
    """Becomes the keeper of a worker with these arguments."""
    os.execv(sys.executable, [sys.executable, "-m", "services.keeper", *arguments])
