"""Ranks on rank 0's host: it starts their processes, tells them each step, and notices their end."""

import multiprocessing
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, reduction, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog
import torch

from baton.errors import EngineFailed
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.parallel.followers import LOAD_SECONDS, check_split, shard_of
from services.engines.pytorch.parallel.joining import SameHost, join
from services.engines.pytorch.parallel.local_follower import follow
from services.engines.pytorch.parallel.messages import Begin, Loaded, NotLoaded, Order, ZeroBlocks
from services.engines.pytorch.parallel.ranks import Ranks
from services.engines.pytorch.runners.fused_runner import Sizes

_log = structlog.get_logger(__name__)

_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Follower:
    rank: int
    process: BaseProcess
    pipe: Connection


class LocalFollowers:
    """Followers in processes that the constructor starts, so that all ranks load at the same time.

    They end with this process, and when `close` is called. On a CPU all map one pool's file.
    """

    def __init__(self, config: PyTorchConfig) -> None:
        check_split(config)
        self.shard = shard_of(config, 0)
        self.failure: str | None = None
        self._folder = TemporaryDirectory(prefix="baton-ranks-")
        self._meeting = Path(self._folder.name) / "meeting"
        self._closing = False
        self._ranks: Ranks | None = None
        context = multiprocessing.get_context("spawn")
        self._followers = [self._start(context, rank, config) for rank in range(1, config.tensor_parallel_size)]
        self._watcher = threading.Thread(target=self._watch, name="baton-ranks", daemon=True)
        self._watcher.start()

    def least_blocks(self, num_blocks: int) -> int:
        return min(num_blocks, *(self._loaded(follower) for follower in self._followers))

    def begin(self, num_blocks: int, sizes: Sizes, pool_file: int | None, device: torch.device) -> Ranks:
        for follower in self._followers:
            self._send(follower, Begin(num_blocks, sizes))
            if self.shard.shares_pool and pool_file is not None:
                reduction.send_handle(follower.pipe, pool_file, follower.process.pid)
        self._ranks = join(self.shard, SameHost(self._meeting), device)
        return self._ranks

    def send(self, order: Order) -> None:
        if self.failure is not None:
            raise RuntimeError(self.failure)
        for follower in self._followers:
            self._send(follower, order)

    def zero(self, block_ids: Sequence[int]) -> None:
        self.send(ZeroBlocks(tuple(block_ids)))

    def close(self) -> None:
        self._closing = True
        for follower in self._followers:
            if self.failure is None:
                with suppress(OSError):  # it may have ended
                    follower.pipe.send(None)
        for follower in self._followers:
            follower.process.join(0 if self.failure else _CLOSE_SECONDS)
            follower.process.kill()
            follower.process.join()
            follower.pipe.close()
        self._watcher.join()
        if self._ranks is not None:
            self._ranks.stop()
        self._folder.cleanup()

    def _start(self, context: "multiprocessing.context.SpawnContext", rank: int, config: PyTorchConfig) -> _Follower:
        ours, theirs = context.Pipe()
        shard = shard_of(config, rank)
        process = context.Process(target=follow, args=(shard, config, self._meeting, theirs), name=f"baton-rank-{rank}")
        process.start()
        theirs.close()
        # It ignores SIGTERM, by which multiprocessing would end it when this process ends.
        util.Finalize(self, process.kill, exitpriority=10)
        return _Follower(rank, process, ours)

    def _loaded(self, follower: _Follower) -> int:
        # A process that ends closes its end of the pipe.
        if not follower.pipe.poll(LOAD_SECONDS):
            raise EngineFailed(f"rank {follower.rank} did not load the model within {LOAD_SECONDS:g} s")
        try:
            answer = follower.pipe.recv()
        except (EOFError, OSError) as error:
            raise EngineFailed(f"rank {follower.rank} ended while it loaded the model") from error
        if isinstance(answer, NotLoaded):
            raise EngineFailed(f"rank {follower.rank} cannot load the model: {answer.reason}")
        assert isinstance(answer, Loaded)
        return answer.num_blocks

    def _send(self, follower: _Follower, order: Order) -> None:
        try:
            follower.pipe.send(order)
        except OSError as error:
            raise RuntimeError(self.failure or f"rank {follower.rank} of the engine has ended") from error

    def _watch(self) -> None:
        ready = connection.wait([follower.process.sentinel for follower in self._followers])
        if self._closing:
            return
        ended = next(follower for follower in self._followers if follower.process.sentinel in ready)
        ended.process.join(_CLOSE_SECONDS)
        self.failure = f"rank {ended.rank} of the engine has ended (exit code {ended.process.exitcode})"
        _log.error("a rank of the engine has ended", rank=ended.rank, exit_code=ended.process.exitcode)
        if self._ranks is not None:
            self._ranks.stop()
