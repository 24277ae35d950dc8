"""A rank's part of a network's weights: attention by heads, feed-forward layers by columns; all else stays whole."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.hooks.tensor_parallel import PackedColwiseParallel, TPShardSpec, resolve_tp_shard_specs
from diffusers.models.activations import GEGLU, SwiGLU
from diffusers.models.attention import AttentionModuleMixin, FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import MochiRMSNorm, RMSNorm

from baton.errors import ConfigError
from services.engines.pytorch.parallel.ranks import Ranks
from services.engines.pytorch.parallel.shards import FIELD, Shard

Plan = Mapping[str, object]
"""How each linear layer is split, by its name, as in the `_tp_plan` of diffusers' classes."""

_COLUMNS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
_ROWS = ("to_out", "to_add_out")
_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
_OF_THE_INPUT = ("group_norm", "spatial_norm", "norm_cross")
_WIDTHS = ("heads", "inner_dim", "inner_kv_dim", "kv_inner_dim")


def split(network: Any, shard: Shard, ranks: Ranks) -> None:
    """Replaces the weights by this rank's part, and adds up where the ranks' results are parts of one sum.

    Raises as `planned`, before anything is changed.
    """
    attentions, specs = planned(network, shard.size)
    for module in attentions.values():
        _split_norms(module, shard, ranks)
        for width in _WIDTHS:
            if isinstance(whole := getattr(module, width, None), int):
                setattr(module, width, whole // shard.size)
    for name, spec in specs.items():
        _keep_part(network, name, spec, shard, ranks)


def planned(network: Any, size: int) -> tuple[dict[str, Any], dict[str, TPShardSpec]]:
    """The attentions whose norms and widths are split, by name, and the parameters' parts. Weights are not read.

    The plan is that of the network's class, if diffusers has one; else it is made by the names of its attention.
    Raises ConfigError naming a module that does not fit.
    """
    plan, attentions = network._tp_plan, dict[str, Any]()
    if plan is None:
        attentions = {name: module for name, module in network.named_modules() if _is_attention(module)}
        for name, module in attentions.items():
            _check(name, module, size)
        plan = _plan(network, attentions)
    elif (heads := network.config.num_attention_heads) % size:
        raise ConfigError(f"{FIELD}: its {heads} heads cannot be divided by {size}")
    try:
        return attentions, resolve_tp_shard_specs(network, dict(plan), size)
    except ValueError as error:
        raise ConfigError(f"{FIELD}: {type(network).__name__} cannot be split: {error}") from error


def _is_attention(module: torch.nn.Module) -> bool:
    return isinstance(module, Attention | AttentionModuleMixin)


def _plan(network: Any, attentions: Mapping[str, Any]) -> Plan:
    plan = dict[str, object]()
    for name, module in attentions.items():
        for child in (*_COLUMNS, *_ROWS):
            layer = getattr(module, child, None)
            if layer is not None:
                where = f"{name}.{child}" + (".0" if isinstance(layer, torch.nn.ModuleList) else "")
                plan[where] = "colwise" if child in _COLUMNS else "rowwise"
    for name, module in network.named_modules():
        if isinstance(module, FeedForward):
            is_gated = isinstance(module.net[0], GEGLU | SwiGLU)
            plan[f"{name}.net.0.proj"] = PackedColwiseParallel([1, 1]) if is_gated else "colwise"
            plan[f"{name}.net.2"] = "rowwise"
    if not plan:
        raise ConfigError(f"{FIELD}: {type(network).__name__} has no attention that can be split")
    return plan


def _check(name: str, module: Any, size: int) -> None:
    """Raises ConfigError naming the module that is not computed head by head, from q, k and v to the output."""
    if module.heads % size:
        raise ConfigError(f"{FIELD}: the {module.heads} heads of {name} cannot be divided by {size}")
    for child in ("to_q", "to_k", "to_v", "to_out"):
        if getattr(module, child, None) is None:
            raise ConfigError(f"{FIELD}: {name} cannot be split: it has no {child}")
    width = module.to_q.out_features
    for child, part in module.named_children():
        match part:
            case torch.nn.Linear() if child in (*_COLUMNS, *_ROWS):
                is_split = child in _ROWS or part.out_features == width
            case torch.nn.ModuleList() if child in _ROWS:
                is_split = isinstance(part[0], torch.nn.Linear)
            case _ if child in _NORMS:
                is_split = _width(part) == width // module.heads or _is_over_heads(part, width)
            case _:
                is_split = child in _OF_THE_INPUT
        if not is_split:
            raise ConfigError(f"{FIELD}: {name}.{child} cannot be split: {type(part).__name__}")


def _is_over_heads(norm: Any, width: int) -> bool:
    has_bias = isinstance(norm, RMSNorm) and norm.bias is not None
    return isinstance(norm, torch.nn.RMSNorm | RMSNorm | MochiRMSNorm) and not has_bias and _width(norm) == width


def _width(norm: Any) -> int | None:
    """The numbers that are normalised together; None if it is not known."""
    match norm:
        case torch.nn.LayerNorm() | torch.nn.RMSNorm():
            shape = norm.normalized_shape
        case RMSNorm() | MochiRMSNorm():
            shape = norm.dim
        case _:
            return None
    return shape[0] if len(shape) == 1 else None


def _split_norms(module: Any, shard: Shard, ranks: Ranks) -> None:
    width = module.to_q.out_features
    for child, norm in tuple(module.named_children()):
        if child in _NORMS and module.heads > 1 and _is_over_heads(norm, width):
            setattr(module, child, NormOverRanks(norm, width, shard, ranks))


class NormOverRanks(torch.nn.Module):
    """A root mean square norm over the heads of all ranks."""

    def __init__(self, norm: Any, width: int, shard: Shard, ranks: Ranks) -> None:
        super().__init__()
        weight = norm.weight
        self.weight = None if weight is None else torch.nn.Parameter(_part(weight, 0, [width], shard), False)
        self._eps, self._width, self._ranks = norm.eps, width, ranks

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Normalises this rank's columns, in float32."""
        exact = states.float()
        squares = self._ranks.add_up(exact.square().sum(-1, keepdim=True))
        eps = torch.finfo(states.dtype).eps if self._eps is None else self._eps
        normal = (exact * torch.rsqrt(squares / self._width + eps)).to(states.dtype)
        return normal if self.weight is None else normal * self.weight


def _keep_part(network: Any, name: str, spec: TPShardSpec, shard: Shard, ranks: Ranks) -> None:
    """Keeps this rank's part of a parameter of a linear layer. Its bias is added once where results are added up."""
    where, parameter = name.rsplit(".", 1)
    layer = network.get_submodule(where)
    whole = getattr(layer, parameter)
    if spec.dim is not None and spec.block_sizes is not None:
        setattr(layer, parameter, torch.nn.Parameter(_part(whole, spec.dim, spec.block_sizes, shard), False))
    elif shard.rank:
        setattr(layer, parameter, None)
    if spec.dim == 1:
        layer.register_forward_hook(lambda _layer, _inputs, part: ranks.add_up(part))


def _part(whole: torch.Tensor, dim: int, blocks: list[int], shard: Shard) -> torch.Tensor:
    """The rank's part of each block, in memory of its own, so that the whole is freed."""
    parts = [block.chunk(shard.size, dim)[shard.rank] for block in torch.split(whole.detach(), blocks, dim)]
    return torch.cat(parts, dim)
