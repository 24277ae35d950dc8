"""Rank 0's side of a split model: starts the other ranks, tells them each step, and notices their end."""

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

from baton.errors import ConfigError, EngineFailed
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.model.fused_model import why_not
from services.engines.pytorch.model.loading import choose_device, read_config
from services.engines.pytorch.model.support import text_shape
from services.engines.pytorch.parallel.follower import follow
from services.engines.pytorch.parallel.messages import Begin, Loaded, NotLoaded, Order, ZeroBlocks
from services.engines.pytorch.parallel.ranks import Ranks, join
from services.engines.pytorch.parallel.shards import FIELD, Shard, check_divisible
from services.engines.pytorch.runners.fused_runner import Sizes

_log = structlog.get_logger(__name__)

LOAD_SECONDS = 1800.0
"""The longest time to wait for another rank to load its weights."""
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Follower:
    rank: int
    process: BaseProcess
    pipe: Connection


def check_split(config: PyTorchConfig) -> None:
    """Raises ConfigError, naming the field, if this model cannot be split here as configured."""
    size = config.tensor_parallel_size
    model = read_config(config.model)
    check_divisible(model, text_shape(model, config.max_context_tokens), size)
    if obstacle := why_not(model):
        raise ConfigError(f"{FIELD}: the model cannot be split: {obstacle}")
    if choose_device(config).type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(f"{FIELD}: {size} GPUs are needed, and this process sees {torch.cuda.device_count()}")


def check_roles(config: PyTorchConfig, roles: Sequence[str]) -> None:
    """Raises ConfigError if a worker with these roles would hand over KV that rank 0 has a part of only."""
    if config.tensor_parallel_size > 1 and "prefill" in roles and choose_device(config).type == "cuda":
        raise ConfigError(
            f"{FIELD}: on GPUs a split model hands no KV over: roles must be [decode], for whole requests"
        )


class Followers:
    """The processes of the ranks above 0. They end with this process, and when `close` is called.

    Entering the engine's calls in this order: the constructor starts them, so that all ranks load at the same time;
    `begin` waits until they have; then `tell` sends steps. Any end of a follower sets `failure`, for good.
    """

    def __init__(self, config: PyTorchConfig) -> None:
        check_split(config)
        self.shard = Shard(0, config.tensor_parallel_size)
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
        """Waits until all ranks have loaded, and returns the blocks that every one has memory for.

        Raises EngineFailed if one of them cannot be loaded.
        """
        return min(num_blocks, *(self._loaded(follower) for follower in self._followers))

    def begin(self, num_blocks: int, sizes: Sizes, pool_file: int | None, device: torch.device) -> Ranks:
        """Gives the others their pool, and joins them. On a CPU all map the same file."""
        for follower in self._followers:
            self._send(follower, Begin(num_blocks, sizes))
            if pool_file is not None:
                reduction.send_handle(follower.pipe, pool_file, follower.process.pid)
        self._ranks = join(self.shard, self._meeting, device)
        return self._ranks

    def tell(self, order: Order) -> None:
        """Sends an order to all ranks. Raises RuntimeError if one has ended."""
        if self.failure is not None:
            raise RuntimeError(self.failure)
        for follower in self._followers:
            self._send(follower, order)

    def zero(self, block_ids: Sequence[int]) -> None:
        """Zeroes blocks in the other ranks' pools."""
        self.tell(ZeroBlocks(tuple(block_ids)))

    def close(self) -> None:
        """Ends the processes; waits for them, but not for long."""
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
        shard = Shard(rank, self.shard.size)
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
