"""Attention over the block pool, with the interface of transformers' models.

The tokens of a step are one row `[1, tokens]`, whatever sequence they belong to. The keys and values of the new tokens
are written to their blocks first; then one call of PyTorch's attention for each group of sequences reads keys and
values gathered from the blocks.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.engines.pytorch.runners.batch import FreshGroup, LayerViews, PagedBatch, PagedGroup

NAME = "baton_paged"


def register() -> None:
    """Registers `attn_implementation=NAME` with transformers."""
    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged_batch: PagedBatch,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: object,
) -> tuple[torch.Tensor, None]:
    """Computes attention for queries `[1, heads, tokens, head_dim]`; returns `[1, tokens, heads, head_dim]`.

    `sliding_window` is accepted and ignored: no context is longer than the window (see support.py).
    """
    assert attention_mask is None
    assert softcap is None
    assert s_aux is None
    layer = paged_batch.cache.layers[int(module.layer_idx)]  # type: ignore[arg-type]
    head_dim = key.shape[-1]
    layer.key_slots.index_copy_(0, paged_batch.slots, key.reshape(-1, head_dim))
    layer.value_slots.index_copy_(0, paged_batch.slots, value.reshape(-1, head_dim))
    parts = []
    for group in paged_batch.groups:
        span = slice(group.start, group.stop)
        if isinstance(group, FreshGroup):
            parts.append(_attend_to_itself(query[:, :, span], key[:, :, span], value[:, :, span], scaling))
        else:
            parts.append(_attend_to_blocks(group, layer, query[0, :, span], scaling))
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return output.unsqueeze(0), None


def _attend_to_itself(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention for queries `[1, heads, tokens, head_dim]`; returns `[tokens, heads, head_dim]`."""
    answer = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return answer[0].transpose(0, 1)


def _attend_to_blocks(group: PagedGroup, layer: LayerViews, query: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention for queries `[heads, tokens, head_dim]`; returns `[tokens, heads, head_dim]`.

    Query heads that share a key head are laid out beside the new tokens, so that keys are not repeated in memory.
    """
    heads, tokens, head_dim = query.shape
    count, width = group.count, tokens // group.count
    shape = (count, -1, group.mask.shape[-1], head_dim)
    keys = layer.keys.index_select(0, group.rows).view(shape)
    values = layer.values.index_select(0, group.rows).view(shape)
    query = query.view(heads, count, width, head_dim).permute(1, 0, 2, 3).reshape(count, keys.shape[1], -1, head_dim)
    answer = scaled_dot_product_attention(query, keys, values, attn_mask=group.mask, scale=scaling)
    return answer.reshape(count, heads, width, head_dim).transpose(1, 2).reshape(tokens, heads, head_dim)
