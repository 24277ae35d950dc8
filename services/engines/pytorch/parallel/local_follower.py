"""The process of a rank above 0 that rank 0 has started on its host, as both see it.

A rank above 0: it loads its part, joins the others, and computes each step that rank 0 announces.
"""

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from baton.errors import BatonError, EngineFailed
from services.engines.context import RankProgress
from services.engines.kv import KvLayout
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.kv_cache.memory import DTYPES, DeviceMemory, block_shape
from services.engines.pytorch.kv_cache.pool_size import layout_of, num_blocks
from services.engines.pytorch.model.loading import LoadedModel, choose_device, load_model
from services.engines.pytorch.parallel.followers import LOAD_SECONDS, check_split, shard_of
from services.engines.pytorch.parallel.joining import SameHost, join
from services.engines.pytorch.parallel.messages import Begin, Loaded, NotLoaded, Order, Ready, ZeroBlocks
from services.engines.pytorch.parallel.processes import RankProcess, RankProcesses, enter_process, leave_process
from services.engines.pytorch.parallel.ranks import Ranks
from services.engines.pytorch.parallel.shards import Shard, part_of_pool
from services.engines.pytorch.runners.fused_runner import FusedRunner, Sizes
from services.engines.pytorch.runners.selection import fused_runner
from services.engines.pytorch.runners.step_tensors import DecodeArrays, StepArrays
from services.keeper.client import KeeperClient


class LeaderConnection(Protocol):
    """The way to rank 0. `recv` raises EOFError when rank 0 has ended."""

    def send(self, message: Any, /) -> None: ...

    def recv(self) -> Any: ...


def load_part(shard: Shard, config: PyTorchConfig, leader: LeaderConnection) -> LoadedModel:
    """Loads this rank's part and tells rank 0, also of a failure, which it then raises."""
    try:
        model = load_model(config, shard)
        leader.send(Loaded(num_blocks(config, model, layout_of(config, model))))
    except (BatonError, RuntimeError, OSError) as error:
        leader.send(NotLoaded(str(error)))
        raise
    return model


def obey(
    runner: FusedRunner, pool: torch.Tensor, shard: Shard, leader: LeaderConnection, progress: RankProgress
) -> None:
    """Computes what rank 0 announces, until it says that this is the end. Raises EOFError if rank 0 ends before."""
    while (order := leader.recv()) is not None:
        match order:
            case DecodeArrays(size):
                runner.replay(order)
                progress.stepped(size)
            case StepArrays(_, shape):
                runner.compute(order)
                progress.stepped(shape[0])
            case ZeroBlocks(block_ids) if not shard.shares_pool:  # rank 0 has zeroed a shared one
                pool[list(block_ids)] = 0
            case Ready():
                progress.ready()


def follow(shard: Shard, config: PyTorchConfig, meeting: Path, pipe: Connection) -> None:
    """Runs until rank 0 says so, or ends."""
    enter_process()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if choose_device(config).type == "cuda":
        torch.cuda.set_device(shard.rank)
    with torch.inference_mode():
        try:
            loaded = load_part(shard, config, pipe)
        except (BatonError, RuntimeError, OSError):  # rank 0 has been told
            return
        runner, pool = _begin(loaded, config, meeting, pipe)
        with suppress(EOFError):
            obey(runner, pool, shard, pipe, _Silent())
    leave_process()


class _Silent:
    """A RankProgress of a process without metrics of its own."""

    is_ready = False

    def loaded(self, seconds: float) -> None:
        """No-op."""

    def ready(self) -> None:
        """No-op."""

    def stepped(self, tokens: int) -> None:
        """No-op."""


def _begin(
    model: LoadedModel, config: PyTorchConfig, meeting: Path, pipe: Connection
) -> tuple[FusedRunner, torch.Tensor]:
    begin = pipe.recv()
    assert isinstance(begin, Begin)
    layout = layout_of(config, model)
    if model.shard.shares_pool:
        pool = part_of_pool(_mapped(layout, begin.num_blocks, reduction.recv_handle(pipe)), model.shard)
    else:
        pool = DeviceMemory(layout, begin.num_blocks, model.device).tensor
    ranks = join(model.shard, SameHost(meeting), model.device)
    return fused_runner(model, pool, begin.sizes, ranks), pool


def _mapped(layout: KvLayout, blocks: int, descriptor: int) -> torch.Tensor:
    """Maps rank 0's pool."""
    mapping = mmap.mmap(descriptor, blocks * layout.block_bytes)
    os.close(descriptor)
    return torch.frombuffer(mapping, dtype=DTYPES[layout.dtype]).view(blocks, *block_shape(layout))


class LocalFollowers:
    """Followers in processes that the constructor starts. On a CPU all map one pool's file."""

    def __init__(self, config: PyTorchConfig) -> None:
        check_split(config)
        self.shard = shard_of(config, 0)
        others = [shard_of(config, rank) for rank in range(1, config.tensor_parallel_size)]
        self._processes = RankProcesses(follow, config, others)

    @property
    def failure(self) -> str | None:
        return self._processes.failure

    def least_blocks(self, num_blocks: int) -> int:
        return min(num_blocks, *(self._loaded(rank) for rank in self._processes.all))

    def replace_earlier(self, keeper: KeeperClient) -> None:
        self._processes.replace_earlier(keeper)

    def begin(self, num_blocks: int, sizes: Sizes, pool_file: int | None, device: torch.device) -> Ranks:
        for rank in self._processes.all:
            self._processes.send(rank, Begin(num_blocks, sizes))
            if self.shard.shares_pool and pool_file is not None:
                reduction.send_handle(rank.pipe, pool_file, rank.process.pid)
        return self._processes.join(self.shard, device)

    def send(self, order: Order) -> None:
        self._processes.send_all(order)

    def zero(self, block_ids: Sequence[int]) -> None:
        self.send(ZeroBlocks(tuple(block_ids)))

    def close(self) -> None:
        self._processes.close()

    def _loaded(self, rank: RankProcess) -> int:
        answer = self._processes.receive(rank, LOAD_SECONDS, "load the model")
        if isinstance(answer, NotLoaded):
            raise EngineFailed(f"rank {rank.rank} cannot load the model: {answer.reason}")
        assert isinstance(answer, Loaded)
        return answer.num_blocks
