"""The fork server: a copy of a worker's process that has imported its code, and done nothing else, for the next one.

The copy is made before the worker starts threads or touches a GPU. The keeper holds a socket to it, as it holds memory;
for each process that it wants it sends one end of a conversation, and is told the process's id. The new process is the
keeper's own child, for which the keeper has to be a subreaper. The server ends when the keeper closes the socket.
"""

import ctypes
import os
import signal
import socket
import threading
from pathlib import Path

from runtime.clock import monotonic
from services.keeper.client import KeeperClient
from services.keeper.messages import Answer, KeeperLost, Request, pair, receive, send

IMPORTS = "imports"
"""The name under which the keeper holds the socket."""

NAME = "baton-imports"
"""The name of the process, as ps shows it."""

_LIBRARY = ctypes.CDLL(None)
_SET_DEATH_SIGNAL, _SET_NAME, _SET_SUBREAPER = 1, 15, 36  # of prctl
_FORK_SECONDS = 5.0
_COMM = Path("/proc/self/comm")


def adopt_orphans() -> None:
    """Makes this process the parent of descendants that lose theirs."""
    _LIBRARY.prctl(_SET_SUBREAPER, 1)


def reap_adopted(own: int | None) -> None:
    """Forgets adopted children that have ended; `own` is a child that somebody waits for."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == own:
            return
        os.waitpid(ended.si_pid, 0)


def die_with(keeper: int) -> None:
    """Has the kernel kill this process with its keeper: one that hangs would not notice that it is gone."""
    _LIBRARY.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)


def fork(server: int, end: socket.socket) -> int:
    """Returns the id of a new child of this process, whose keeper is at the other end of `end`.

    Raises KeeperLost if the server has ended, does not answer, or its processes become no children of this one.
    """
    with socket.socket(fileno=os.dup(server)) as asking:
        asking.settimeout(_FORK_SECONDS)
        send(asking, Request("fork"), [end.fileno()])
        pid = Answer(**receive(asking).content).pid
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError as error:
        raise KeeperLost("its processes are not the keeper's children") from error
    return pid


def keep_imports(keeper: KeeperClient) -> KeeperClient:
    """Leaves a fork server to the keeper. Returns the keeper in this process; in each that is forked later its own.

    Without a server if this process has threads already.
    """
    if threading.active_count() > 1:
        return keeper
    own, keepers = pair()
    parent = os.getppid()
    if middle := os.fork():
        own.close()
        os.waitpid(middle, 0)
        with keepers:
            keeper.put(IMPORTS, "", [keepers.fileno()])
        return keeper
    # The process that returns below is another one, a grandchild of the server.
    keepers.close()
    keeper.close()
    if os.fork():
        os._exit(0)
    _settle(parent)
    return KeeperClient(_serve(own, parent))


def _serve(own: socket.socket, keeper: int) -> socket.socket:
    """Forks for as long as the keeper holds the other end. Returns in the processes that were forked."""
    name = _COMM.read_text()
    _LIBRARY.prctl(_SET_NAME, NAME.encode())
    while (end := _forked(own)) is None:
        pass
    own.close()
    _settle(keeper)
    _COMM.write_text(name)
    return end


def _forked(own: socket.socket) -> socket.socket | None:
    """Forks once the keeper says so. Returns the socket that came with it, in the new process alone."""
    try:
        [end] = receive(own).pop_descriptors()
        pid = _fork_twice()
        if pid:
            os.close(end)
            send(own, Answer(pid=pid))
            return None
    except (KeeperLost, OSError, ValueError):
        os._exit(0)
    return socket.socket(fileno=end)


def _fork_twice() -> int:
    """Returns the id of a process whose parent has ended; 0 in that process."""
    reads, writes = os.pipe()
    if middle := os.fork():
        os.close(writes)
        with open(reads, "rb") as pipe:
            pid = int(pipe.read())
        os.waitpid(middle, 0)
        return pid
    if pid := os.fork():
        os.write(writes, str(pid).encode())
        os._exit(0)
    os.close(reads)
    os.close(writes)
    return 0


def _settle(keeper: int) -> None:
    """Waits until this process is the keeper's child, whose parent is just ending; it dies with it from then on."""
    os.setsid()
    ends_at = monotonic() + _FORK_SECONDS
    while os.getppid() != keeper and monotonic() < ends_at:
        os.sched_yield()
    die_with(keeper)
