"""A rank's view of a pool that has the heads of all ranks."""

import torch

from services.engines.pytorch.parallel.shards import Shard


def part_of_pool(pool: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Returns the view of a pool `[blocks, layers, 2, kv_heads, block_tokens, head_dim]` with one rank's heads.

    A pool that is not shared has this rank's heads only, and is returned as it is.
    """
    return pool[:, :, :, shard.part(pool.shape[3])] if shard.shares_pool else pool
