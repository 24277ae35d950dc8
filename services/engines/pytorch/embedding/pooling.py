"""From the states of a text's tokens to one vector. The modes are those of sentence-transformers."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

# (states [texts, tokens, hidden], mask [texts, tokens] of 1 and 0) to vectors [texts, hidden]; padding is on the right.
Pooling: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def pool(states: torch.Tensor, mask: torch.Tensor, modes: Sequence[str]) -> torch.Tensor:
    """Returns the vectors in float32; those of several modes are joined, in their order."""
    states = states.float()
    return torch.cat([POOLINGS[mode](states, mask) for mode in modes], dim=-1)


def _last(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]


def _cls(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    del mask
    return states[:, 0]


def _max(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return states.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(1)


def _sum(states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    # Padding may be NaN, which a weight of 0 would not remove.
    return states.masked_fill(weights.unsqueeze(-1) == 0, 0.0).mul(weights.unsqueeze(-1)).sum(1)


def _mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _sum(states, mask.float()) / mask.sum(1, keepdim=True)


def _mean_sqrt_len(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _sum(states, mask.float()) / mask.sum(1, keepdim=True).sqrt()


def _weighted_mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask.float()
    return _sum(states, weights) / weights.sum(1, keepdim=True)


POOLINGS: dict[str, Pooling] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len": _mean_sqrt_len,
    "weighted_mean": _weighted_mean,
    "last": _last,
}
"""In the order in which sentence-transformers joins them."""
