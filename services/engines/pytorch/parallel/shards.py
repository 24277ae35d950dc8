"""A rank's part of a model's weights: heads and columns of the MLP, split evenly."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from baton.errors import ConfigError
from services.engines.pytorch.model.support import TextShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FIELD = "engine.tensor_parallel_size"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`; a model that is not split is rank 0 of 1.

    `shares_pool` says that all ranks map one pool, with the heads of all; else each has a pool of its own heads.
    """

    rank: int = 0
    size: int = 1
    shares_pool: bool = False

    def part(self, whole: int) -> slice:
        """Returns this rank's part of `whole` rows; the last part may be shorter."""
        width = -(-whole // self.size)
        return slice(min(self.rank * width, whole), min((self.rank + 1) * width, whole))


WHOLE = Shard()


def check_divisible(config: "PreTrainedConfig", shape: TextShape, size: int) -> None:
    """Raises ConfigError, naming the field, if the model cannot be split into `size` equal parts."""
    numbers = {
        "attention heads": shape.query_heads,
        "key and value heads": shape.kv_heads,
        "columns of the MLP": int(config.get_text_config().intermediate_size),
    }
    for name, number in numbers.items():
        if number % size:
            raise ConfigError(f"{FIELD}: the model's {number} {name} cannot be divided by {size}")


def shape_of_part(shape: TextShape, shard: Shard) -> TextShape:
    """Returns the shape of one rank's part, with its number of heads."""
    return replace(shape, query_heads=shape.query_heads // shard.size, kv_heads=shape.kv_heads // shard.size)


def keep_part(module: "PreTrainedModel", shard: Shard) -> None:
    """Replaces the weights of a Llama-like model by the rank's part of them, and frees the others.

    Queries, keys, values, gate and up lose rows; output and down lose columns, and their biases on all ranks but 0,
    since the ranks' results are added. The head loses rows, and is padded to equal parts. Norms and the embedding stay.
    """
    outer: Any = module
    text = getattr(outer.model, "language_model", outer.model)
    for layer in text.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            _keep_rows(linear, shard)
        for linear in (attention.o_proj, mlp.down_proj):
            _keep_columns(linear, shard)
    _keep_rows(outer.lm_head, shard)


def _keep_rows(linear: torch.nn.Linear, shard: Shard) -> None:
    rows, width = linear.out_features, -(-linear.out_features // shard.size)
    linear.weight = _parameter(_padded(linear.weight[shard.part(rows)], width))
    if linear.bias is not None:
        linear.bias = _parameter(_padded(linear.bias[shard.part(rows)], width))
    linear.out_features = width


def _keep_columns(linear: torch.nn.Linear, shard: Shard) -> None:
    linear.weight = _parameter(linear.weight[:, shard.part(linear.in_features)])
    if shard.rank:
        linear.register_parameter("bias", None)
    linear.in_features //= shard.size


def _padded(part: torch.Tensor, rows: int) -> torch.Tensor:
    return part if len(part) == rows else torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])


def _parameter(part: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)


def part_of_pool(pool: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Returns the view of a pool `[blocks, layers, 2, kv_heads, block_tokens, head_dim]` with one rank's heads.

    A pool that is not shared has this rank's heads only, and is returned as it is.
    """
    return pool[:, :, :, shard.part(pool.shape[3])] if shard.shares_pool else pool
