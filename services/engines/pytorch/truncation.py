"""Which tokens may be drawn at all: top-k, then top-p of what that leaves, then min-p."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.engine import Sampling

FEW = 1024
"""Candidates that are looked at first. A row whose top-p needs more is looked at whole; the outcome is the same."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Candidates of each row, likeliest first, `[rows, n]`; those that may not be drawn have a logit of -inf."""

    logits: torch.Tensor
    token_ids: torch.Tensor


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


def keep(logits: torch.Tensor, samplings: Sequence[Sampling]) -> Kept:
    """Ranks the candidates of `logits` `[rows, vocabulary]`, after temperature, and bans what is cut off."""
    vocabulary = logits.shape[1]
    limits = [sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary for sampling in samplings]
    width = min(vocabulary, max(FEW, *(limit for limit in limits if limit < vocabulary), FEW))
    kept = _ranked(logits, samplings, limits, width)
    if kept is None:
        kept = _ranked(logits, samplings, limits, vocabulary)
    assert kept is not None
    return kept


def _ranked(logits: torch.Tensor, samplings: Sequence[Sampling], limits: Sequence[int], width: int) -> Kept | None:
    """The first `width` candidates, or None if some row's top-p reaches beyond them."""
    values, token_ids = logits.topk(width, dim=-1)
    limit = torch.tensor(limits, device=logits.device).unsqueeze(1)
    values = values.masked_fill(torch.arange(width, device=logits.device) >= limit, -torch.inf)
    bounded = limit < logits.shape[1]
    total = torch.where(bounded, values.logsumexp(-1, keepdim=True), logits.logsumexp(-1, keepdim=True))
    mass = (values - total).exp().cumsum(dim=-1)
    top_p = torch.tensor([s.top_p for s in samplings], dtype=logits.dtype, device=logits.device).unsqueeze(1)
    if width < logits.shape[1] and bool((~bounded & (mass[:, -1:] < top_p)).any()):
        return None
    before = mass - (values - total).exp()
    values = values.masked_fill((before >= top_p) & (top_p < 1.0), -torch.inf)
    apply_min_p(values, samplings)
    return Kept(values, token_ids)
