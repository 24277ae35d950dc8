"""The other ranks as rank 0 sees them, wherever they run, and the models and roles that cannot be split."""

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.errors import ConfigError
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.model.fused_model import why_not
from services.engines.pytorch.model.loading import choose_device, read_config
from services.engines.pytorch.model.support import text_shape
from services.engines.pytorch.parallel.messages import Order
from services.engines.pytorch.parallel.ranks import Ranks
from services.engines.pytorch.parallel.shards import FIELD, Shard, check_divisible
from services.engines.pytorch.runners.fused_runner import Sizes
from services.keeper.client import KeeperClient

LOAD_SECONDS = 1800.0
"""The longest time to wait for another rank to load its weights."""


class Followers(Protocol):
    """The ranks above 0, as rank 0 sees them. They load when they are there; then come `least_blocks` and `begin`, and
    then `send` sends steps. The end of one sets `failure`, for good.
    """

    shard: Shard

    @property
    def failure(self) -> str | None: ...

    def least_blocks(self, num_blocks: int) -> int:
        """Waits until all ranks have loaded, and returns the blocks that every one has memory for.

        Raises EngineFailed if one of them cannot be loaded.
        """

    def replace_earlier(self, keeper: KeeperClient) -> None:
        """Ends those of an earlier process of the worker, whose memory this one takes over. Raises EngineFailed."""

    def begin(self, num_blocks: int, sizes: Sizes, pool_file: int | None, device: torch.device) -> Ranks:
        """Gives the others their pool, or its size, and joins them."""

    def send(self, order: Order) -> None:
        """Sends an order to all ranks. Raises RankLost if one has ended."""

    def zero(self, block_ids: Sequence[int]) -> None:
        """Zeroes blocks in the other ranks' pools."""

    def close(self) -> None:
        """Ends the other ranks; waits for them, but not for long."""


def check_split(config: PyTorchConfig) -> None:
    """Raises ConfigError, naming the field, if this model cannot be split here as configured."""
    size = config.tensor_parallel_size
    model = read_config(config.model)
    check_divisible(model, text_shape(model, config.max_context_tokens), size)
    if obstacle := why_not(model):
        raise ConfigError(f"{FIELD}: the model cannot be split: {obstacle}")
    needed = size if config.multi_node is None else 1
    if choose_device(config).type == "cuda" and torch.cuda.device_count() < needed:
        raise ConfigError(f"{FIELD}: {needed} GPUs are needed, and this process sees {torch.cuda.device_count()}")


def shard_of(config: PyTorchConfig, rank: int) -> Shard:
    """Returns a rank's shard. Processes of one host share a pool in host memory."""
    shares_pool = config.multi_node is None and choose_device(config).type == "cpu"
    return Shard(rank, config.tensor_parallel_size, shares_pool)


def check_roles(config: PyTorchConfig, roles: Sequence[str]) -> None:
    """Raises ConfigError if a worker with these roles would hand over KV that rank 0 has a part of only."""
    if config.tensor_parallel_size == 1 or "prefill" not in roles or shard_of(config, 0).shares_pool:
        return
    where = "over several hosts" if config.multi_node else "on GPUs"
    raise ConfigError(f"{FIELD}: {where} a split model hands no KV over: roles must be [decode], for whole requests")
