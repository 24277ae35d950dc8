"""Which tokens may be drawn at all: top-k, then top-p of what that leaves, then min-p."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.prompt import Sampling

_WIDTHS = (128, 1024, 8192)


@dataclass(frozen=True, slots=True)
class Kept:
    """Candidates of each row, likeliest first, `[rows, n]`; those that may not be drawn have a logit of -inf.

    A row is `complete` if everything that may be drawn is among them.
    """

    logits: torch.Tensor
    token_ids: torch.Tensor
    complete: list[bool]


def widths(vocabulary: int) -> list[int]:
    """How many candidates to look at: few, which is mostly enough, then more, then all."""
    return [width for width in _WIDTHS if width < vocabulary] + [vocabulary]


def cuts(sampling: Sampling) -> bool:
    """Whether tokens must be ranked to know which may be drawn."""
    return sampling.top_k > 0 or sampling.top_p < 1.0


def apply_min_p(logits: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    """Bans, in place, what is less likely than `min_p` times the likeliest token."""
    if all(sampling.min_p == 0.0 for sampling in samplings):
        return
    ratio = torch.tensor([sampling.min_p for sampling in samplings], dtype=logits.dtype, device=logits.device)
    least = logits.amax(dim=-1, keepdim=True) + ratio.log().unsqueeze(1)
    logits.masked_fill_(logits < least, -torch.inf)


def keep(logits: torch.Tensor, samplings: Sequence[Sampling], width: int) -> Kept:
    """Ranks the `width` likeliest of `logits` `[rows, vocabulary]`, after temperature, and bans what is cut off."""
    vocabulary = logits.shape[1]
    limits = [sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary for sampling in samplings]
    limit = torch.tensor(limits, device=logits.device).unsqueeze(1)
    top_p = torch.tensor([s.top_p for s in samplings], dtype=logits.dtype, device=logits.device).unsqueeze(1)
    values, token_ids = logits.topk(width, dim=-1)
    values = values.masked_fill(torch.arange(width, device=logits.device) >= limit, -torch.inf)
    whole = torch.where(limit < vocabulary, values.logsumexp(-1, keepdim=True), logits.logsumexp(-1, keepdim=True))
    shares = (values - whole).exp()
    mass = shares.cumsum(dim=-1)
    values = values.masked_fill((mass - shares >= top_p) & (top_p < 1.0), -torch.inf)
    apply_min_p(values, samplings)
    complete = (limit <= width) | ((mass[:, -1:] >= top_p) & (limit == vocabulary) & (top_p < 1.0))
    return Kept(values, token_ids, complete[:, 0].tolist())
