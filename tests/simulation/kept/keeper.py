"""A keeper and its processes, by the product's own code, in a world.

Sockets, packets, descriptors and memory are real ones of this process: the kernel frees memory with its last holder.
Of the world are what would block (a thread that runs when the loop lets it), the processes, their ids and their
signals, and which descriptors a process has open when it is killed.
"""

import errno
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import services.engines.pytorch.kv_cache.kept_cache
import services.keeper.client
import services.keeper.keeper
import services.keeper.process
import services.keeper.silence
import services.keeping
from services.engines.pytorch.kv_cache.memory import anonymous_file
from services.keeper.child import Ending
from services.keeper.client import KeeperClient
from services.keeper.keeper import Keeper
from services.keeper.memory import KeptDescriptors
from services.keeper.messages import KeeperLost, pair, receive, send
from services.keeping import Upgrader
from simulation.fibers import Fiber
from simulation.kept.engine import KeptEngine
from simulation.loop import NODE, Node
from simulation.network import ListeningSocket

_DYING_SECONDS = 2e-3
_WAKE_SECONDS = 1e-4  # until a process that waits has a processor, in the mean


class KeptProcess:
    """A process of a worker, as its keeper has started it. `end` is its end of their conversation."""

    def __init__(self, keeper: "SimulatedKeeper", pid: int, end: socket.socket) -> None:
        self.keeper, self.pid, self.end = keeper, pid, end
        self.ended = os.eventfd(0)  # readable once it is dead
        self.code: int | None = None
        self.node: Node
        self.stopping: Any = None
        self.client: KeeperClient | None = None
        self.engine: KeptEngine | None = None
        self.upgrader: Upgrader | None = None
        self.opening: KeptEngine | None = None  # that has got memory, and has not taken it over yet
        self._unopened: dict[int, int] = {}  # the inodes of descriptors of such memory

    def connect(self) -> KeeperClient:
        """Its client, once."""
        self.client = KeeperClient(self.end)
        return self.client

    def note_memory(self, descriptors: Sequence[int]) -> None:
        """It has got or made kept memory, which its engine is about to take over."""
        self._unopened.update({each: os.fstat(each).st_ino for each in descriptors})

    def has_opened(self, engine: KeptEngine) -> None:
        """Its engine owns its memory from now on."""
        self.engine, self.opening = engine, None
        self._unopened.clear()

    def close_unopened(self) -> None:
        """It has died, perhaps amid its start."""
        if self.opening is not None:
            self.opening.close_pages()
        for descriptor, inode in self._unopened.items():
            if _inode(descriptor) == inode:
                os.close(descriptor)
        self._unopened.clear()

    def end_with(self, code: int) -> None:
        """It is dead: its kernel closes what it had open, and tells its parent."""
        self.code = code
        for each in (self.client, self.end):
            if each is not None:
                each.close()
        os.eventfd_write(self.ended, 1)
        self.keeper.wake()


def _inode(descriptor: int) -> int | None:
    """The inode of what is open there; None if nothing is."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


class SimulatedChild:
    """In the place of the keeper's handle of a process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = _keeper_here().processes[pid]
        self.pidfd = os.dup(self._process.ended)

    def send(self, number: int) -> None:
        """Sends a signal."""
        process = self._process
        if process.code is not None:
            return
        if number == signal.SIGKILL:
            # Not at once: its kernel has to end all of its threads first.
            keepers = process.keeper.world.keepers
            process.node.loop.call_later(keepers.random.expovariate(1 / _DYING_SECONDS), keepers.killed, process)
        elif process.stopping is not None:
            process.node.loop.call_soon(process.stopping.set, context=process.node.context())

    def wait(self, *, hung: bool) -> Ending:
        """It is dead."""
        assert Fiber.current is not None
        Fiber.current.wait_until(lambda: self._process.code is not None, None)
        code = self._process.code
        assert code is not None
        os.close(self.pidfd)
        del self._process.keeper.processes[self.pid]
        return Ending(code, hung and code == -signal.SIGKILL)


class SimulatedKeeper:
    """One process of a keeper."""

    def __init__(self, world: Any, name: str, number: int) -> None:
        self.world, self.name = world, name
        self.node = Node(world.loop, f"keeper-{name}", world.ip_of(name), number)
        self.signals, self._signalling = socket.socketpair()
        self.processes: dict[int, KeptProcess] = {}
        self.memories: list[KeptDescriptors] = []
        self.ends: list[socket.socket] = []
        self.refusals = 0  # of memory, that are left
        self.is_told_to_stop = False
        self.freed = 0  # how often it has freed KV
        self._pids = self._wakes = 0
        self._fiber = Fiber(world.loop, self.node.context(), self._run)
        self.waiting: list[Fiber] = []  # of its workers

    @property
    def living(self) -> list[KeptProcess]:
        """The processes of its worker, the one that serves first."""
        return [one for one in self.processes.values() if one.code is None]

    @property
    def kept_descriptors(self) -> list[int]:
        """The descriptors that it holds for its worker."""
        kept = [one for memory in self.memories for one in memory._kept.values()]
        return [each for one in kept for each in one.descriptors]

    def _run(self) -> None:
        code = Keeper([self.name]).run()
        self.world.keepers.ended(self, code)

    def select(self, reads: Sequence[Any], _writes: Any, _errors: Any, seconds: float | None = None) -> Any:
        """In the place of `select.select`."""
        assert Fiber.current is self._fiber
        ready = self._fiber.wait_until(partial(_readable, reads), seconds)
        return ready, [], []

    def wake(self) -> None:
        """Something has happened that it may wait for, or its workers."""
        if self.node.dead:
            return
        seconds = self.world.keepers.random.expovariate(1 / _WAKE_SECONDS)
        self.world.loop.call_later(seconds, self.run_now, context=self.node.context())

    def run_now(self) -> None:
        """Runs until it waits. Then those of its workers go on that have got their answers."""
        if not self.node.dead:
            self._fiber.resume()
        for fiber in tuple(self.waiting):
            fiber._loop.call_soon(fiber.resume, context=fiber._context.copy())

    def signal(self, number: int) -> None:
        """Sends a signal to it."""
        self.is_told_to_stop = True
        self._signalling.send(bytes([number]))
        self.wake()

    def start(self, end: socket.socket) -> int:
        """Starts a process of its worker."""
        self._pids += 1
        process = self.processes[self._pids] = KeptProcess(self, self._pids, end.dup())
        self.world.keepers.begin(process)
        return process.pid

    def close(self) -> None:
        """Closes all that it has open, as its kernel does."""
        for memory in self.memories:
            for name in memory.names:
                memory.drop(name)
        for each in (*self.ends, self.signals, self._signalling):
            each.close()


# In the place of the kernel.


class _Here:
    """The keepers of this run: by the process that is or has one; and all files that were ever kept."""

    find: ClassVar[Callable[[Node | None], SimulatedKeeper]]
    files: ClassVar[set[int]]
    listening: ClassVar[dict[int, ListeningSocket]]


def install(find: Callable[[Node | None], SimulatedKeeper], files: set[int]) -> None:
    """Lets keepers and their workers run in a world."""
    _Here.find, _Here.files, _Here.listening = staticmethod(find), files, {}
    own: Any = services.keeper.keeper
    own.select, own._signals = SimpleNamespace(select=_select), _signals
    own.start = lambda _command, end: _keeper_here().start(end)
    own.adopt_orphans, own.reap_adopted = _nothing, _nothing
    own.say = lambda words: _say(words)
    process: Any = services.keeper.process
    process.Child, process.pair = SimulatedChild, _pair
    services.keeper.silence._threads_of = lambda _pid: {}
    services.keeper.client.send, services.keeper.client.receive = _send, _receive
    cache: Any = services.engines.pytorch.kv_cache.kept_cache
    cache.anonymous_file, cache.pool_file = _memory, lambda size, _device: _memory(size)
    keeping: Any = services.keeping
    keeping.open_sockets, keeping.socket = _bind, SimpleNamespace(socket=_adopt)
    _watch_memory()


def _watch_memory() -> None:
    """Notes what each keeper holds, and how often it frees KV, other than to hold something else in its place."""
    begin, drop, put = KeptDescriptors.__init__, KeptDescriptors.drop, KeptDescriptors.put

    def beginning(kept: KeptDescriptors) -> None:
        begin(kept)
        _keeper_here().memories.append(kept)

    def dropping(kept: KeptDescriptors, name: str) -> bool:
        found = drop(kept, name)
        if found and name == "kv" and NODE.get() is not None:
            _keeper_here().freed += 1
        return found

    def putting(kept: KeptDescriptors, *arguments: Any) -> None:
        keeper = _keeper_here()
        freed = keeper.freed
        put(kept, *arguments)
        keeper.freed = freed

    KeptDescriptors.__init__, KeptDescriptors.drop = beginning, dropping  # type: ignore[method-assign]
    KeptDescriptors.put = putting  # type: ignore[method-assign]


def _keeper_here() -> SimulatedKeeper:
    return _Here.find(NODE.get())


def _say(words: str) -> None:
    keeper = _keeper_here()
    keeper.world.log("keeper says", keeper.name, words)


def _select(*arguments: Any) -> Any:
    return _keeper_here().select(*arguments)


def _readable(reads: Sequence[Any]) -> list[Any]:
    return select.select(reads, [], [], 0)[0]


@contextmanager
def _signals() -> Iterator[socket.socket]:
    yield _keeper_here().signals


def _pair() -> tuple[socket.socket, socket.socket]:
    own, end = pair()
    _keeper_here().ends.append(own)
    return own, end


def _send(to: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    send(to, message, descriptors)
    _keeper_here().wake()


def _receive(source: socket.socket) -> Any:
    """Waits on a thread of its process; on the event loop of one that begins, which has nothing else to do, the answer
    comes at once, also of a keeper that stands still: it would be waited for.
    """
    fiber, keeper = Fiber.current, _keeper_here()
    if fiber is None or fiber is keeper._fiber:
        if not _readable([source]):
            keeper.run_now()
    else:
        keeper.waiting.append(fiber)
        fiber.wait_until(partial(_readable, [source]), source.gettimeout())
        keeper.waiting.remove(fiber)
    if not _readable([source]):
        raise KeeperLost("timed out")
    return receive(source)


def _bind(host: str, port: int) -> list[ListeningSocket]:
    """Sockets that listen, which the keeper of this process is about to hold."""
    keeper = _keeper_here()
    found: list[ListeningSocket] = keeper.world.network.bind(host, port)
    for each in found:
        each.keeper = keeper.node
        _Here.listening[os.fstat(each.fileno()).st_ino] = each
    return found


def _adopt(fileno: int) -> ListeningSocket:
    """The socket that an earlier process of this worker has listened at."""
    node = NODE.get()
    assert node is not None
    found = _Here.listening[os.fstat(fileno).st_ino]
    os.close(fileno)
    found.adopt_by(node)
    return found


def _memory(size: int) -> int:
    keeper = _keeper_here()
    if keeper.refusals:
        keeper.refusals -= 1
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    descriptor = anonymous_file(size)
    _Here.files.add(os.fstat(descriptor).st_ino)
    keeper.world.keepers.process_of(NODE.get()).note_memory([descriptor])
    return descriptor


def _nothing(*_: object) -> None:
    """In the place of what concerns real processes."""
