"""Ranks on rank 0's host: it tells their processes each step."""

from collections.abc import Sequence
from multiprocessing import reduction

import torch

from baton.errors import EngineFailed
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.parallel.followers import LOAD_SECONDS, check_split, shard_of
from services.engines.pytorch.parallel.local_follower import follow
from services.engines.pytorch.parallel.messages import Begin, Loaded, NotLoaded, Order, ZeroBlocks
from services.engines.pytorch.parallel.processes import RankProcess, RankProcesses
from services.engines.pytorch.parallel.ranks import Ranks
from services.engines.pytorch.runners.fused_runner import Sizes


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
