"""A rank above 0: it loads its part, joins the others, and computes each step that rank 0 announces."""

from typing import Any, Protocol

import torch

from baton.errors import BatonError
from services.engines.context import RankProgress
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.kv_cache.pool_size import layout_of, num_blocks
from services.engines.pytorch.model.loading import LoadedModel, load_model
from services.engines.pytorch.parallel.messages import Loaded, NotLoaded, Ready, ZeroBlocks
from services.engines.pytorch.parallel.shards import Shard
from services.engines.pytorch.runners.fused_runner import FusedRunner
from services.engines.pytorch.runners.step_tensors import DecodeArrays, StepArrays


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
