"""The processes of ranks above 0, which rank 0 starts on its host: their start, messages and end.

They register nowhere and serve nothing.
"""

import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import structlog
import torch

from baton.errors import EngineFailed
from services.engines.pytorch.parallel.joining import SameHost, join
from services.engines.pytorch.parallel.ranks import RankLost, Ranks
from services.engines.pytorch.parallel.shards import Shard
from services.keeper.client import KeeperClient

_log = structlog.get_logger(__name__)

_CLOSE_SECONDS = 5.0
_KILL_SECONDS = 10.0
_NAME = "ranks"  # to the keeper

Follow = Callable[[Shard, Any, Path, Connection], None]
"""The work of a rank, in its process: with its shard, the configuration, where the ranks meet, and the pipe to rank 0.

It begins by `enter_process`.
"""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank above 0."""

    rank: int
    process: BaseProcess
    pipe: Connection


class RankProcesses:
    """A process for each shard, which the constructor starts, so that all ranks load at the same time.

    They end with this process, and when `close` is called. The end of one sets `failure`, for good.
    """

    def __init__(self, follow: Follow, config: Any, shards: Sequence[Shard]) -> None:
        self.failure: str | None = None
        self._folder = TemporaryDirectory(prefix="baton-ranks-")
        self._meeting = Path(self._folder.name) / "meeting"
        self._closing = False
        self._ranks: Ranks | None = None
        context = multiprocessing.get_context("spawn")
        self.all = [self._start(context, follow, config, shard) for shard in shards]
        self._watcher = threading.Thread(target=self._watch, name="baton-ranks", daemon=True)
        self._watcher.start()

    def receive(self, rank: RankProcess, seconds: float, doing: str) -> Any:
        """The next message of a rank. Raises EngineFailed if it ends, or is not `doing` within so many seconds."""
        try:
            # A process that ends closes its end of the pipe.
            if not rank.pipe.poll(seconds):
                raise EngineFailed(f"rank {rank.rank} did not {doing} within {seconds:g} s")
            return rank.pipe.recv()
        except (EOFError, OSError) as error:
            raise EngineFailed(f"rank {rank.rank} of the engine has ended: it was to {doing}") from error

    def send(self, rank: RankProcess, message: object) -> None:
        """Raises RankLost if it has ended."""
        try:
            rank.pipe.send(message)
        except OSError as error:
            raise RankLost(self.failure or f"rank {rank.rank} of the engine has ended") from error

    def send_all(self, message: object) -> None:
        """Sends to all ranks. Raises RankLost if one has ended."""
        if self.failure is not None:
            raise RankLost(self.failure)
        for rank in self.all:
            self.send(rank, message)

    def replace_earlier(self, keeper: KeeperClient) -> None:
        """Ends the ranks that an earlier process of the worker has left, which may amid a step still write into the
        memory that is kept; has the keeper hold these ones instead. Raises EngineFailed if one does not end.
        """
        for number in keeper.get(_NAME, "").descriptors:
            _end(number)
        own = [os.pidfd_open(rank.process.pid or 0) for rank in self.all]
        keeper.put(_NAME, "", own)
        for number in own:
            os.close(number)

    def join(self, shard: Shard, device: torch.device) -> Ranks:
        """Joins all ranks, as rank 0. Raises RuntimeError after START_SECONDS."""
        self._ranks = join(shard, SameHost(self._meeting), device)
        return self._ranks

    def close(self) -> None:
        """Ends the processes: asks by None, waits, but not for long, and kills."""
        self._closing = True
        for rank in self.all:
            if self.failure is None:
                with suppress(OSError):  # it may have ended
                    rank.pipe.send(None)
        for rank in self.all:
            rank.process.join(0 if self.failure else _CLOSE_SECONDS)
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()
        self._watcher.join()
        if self._ranks is not None:
            self._ranks.stop()
        self._folder.cleanup()

    def _start(self, context: SpawnContext, follow: Follow, config: Any, shard: Shard) -> RankProcess:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=follow, args=(shard, config, self._meeting, theirs), name=f"baton-rank-{shard.rank}"
        )
        process.start()
        theirs.close()
        # It ignores SIGTERM, by which multiprocessing would end it when this process ends.
        util.Finalize(self, process.kill, exitpriority=10)
        return RankProcess(shard.rank, process, ours)

    def _watch(self) -> None:
        ready = connection.wait([rank.process.sentinel for rank in self.all])
        if self._closing:
            return
        ended = next(rank for rank in self.all if rank.process.sentinel in ready)
        ended.process.join(_CLOSE_SECONDS)
        self.failure = f"rank {ended.rank} of the engine has ended (exit code {ended.process.exitcode})"
        _log.error("a rank of the engine has ended", rank=ended.rank, exit_code=ended.process.exitcode)
        if self._ranks is not None:
            self._ranks.stop()


def _end(pidfd: int) -> None:
    """Kills a process, and waits for its end."""
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll = select.poll()  # `select` knows no descriptor beyond 1,023
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(_KILL_SECONDS * 1000):
            raise EngineFailed("a rank of the worker's last process does not end")
    finally:
        os.close(pidfd)


def enter_process() -> None:
    """Begins the process of a rank above 0. Rank 0 decides when it ends: signals that whole process groups get are
    ignored, and it ends when rank 0's process has ended.
    """
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    _end_with_parent()
    level = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(wrapper_class=level, logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def leave_process() -> None:
    """Ends it at once: NCCL would wait for the other ranks."""
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent() -> None:
    """Ends this process when rank 0's has ended, also amid an operation that waits for rank 0.

    The kernel's own signal of a parent's death would come at the end of the thread that started this process.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="baton-parent", daemon=True).start()
