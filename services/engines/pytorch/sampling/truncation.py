"""Which tokens may be sampled: top-k, then top-p of the rest, then min-p."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.engines.prompt import Sampling

_WIDTHS = (128, 1024, 8192)


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """Candidates of each row, likeliest first, `[rows, n]`; the logits of excluded ones are -inf.

    A row is `complete` if it contains every token that may be sampled.
    """

    logits: torch.Tensor
    token_ids: torch.Tensor
    complete: list[bool]


def widths(vocabulary: int) -> list[int]:
    """Returns the numbers of candidates to try: few, which is usually enough, then more, then all."""
    return [width for width in _WIDTHS if width < vocabulary] + [vocabulary]


def cuts(sampling: Sampling) -> bool:
    """True if tokens must be ranked to know which may be sampled."""
    return sampling.top_k > 0 or sampling.top_p < 1.0


def apply_min_p(logits: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    """Excludes, in place, tokens less likely than `min_p` times the likeliest one."""
    if all(sampling.min_p == 0.0 for sampling in samplings):
        return
    ban_unlikely(logits, _column(logits, [sampling.min_p for sampling in samplings]))


@dataclass(frozen=True, slots=True)
class Ranked:
    """KeptLogits with `complete` `[rows]` on the device, so that nothing waits for it."""

    logits: torch.Tensor
    token_ids: torch.Tensor
    complete: torch.Tensor


def keep(logits: torch.Tensor, samplings: Sequence[Sampling], width: int) -> KeptLogits:
    """Ranks the `width` likeliest of `logits` `[rows, vocabulary]`, after temperature, and excludes those cut off."""
    vocabulary = logits.shape[1]
    limits = [sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary for sampling in samplings]
    limit = torch.tensor(limits, device=logits.device).unsqueeze(1)
    top_p = _column(logits, [sampling.top_p for sampling in samplings])
    min_p = _column(logits, [sampling.min_p for sampling in samplings])
    ranked = rank(logits, limit, top_p, min_p if any(s.min_p for s in samplings) else None, width)
    return KeptLogits(ranked.logits, ranked.token_ids, ranked.complete.tolist())


def rank(
    logits: torch.Tensor, limit: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor | None, width: int
) -> Ranked:
    """Ranks with the options as columns `[rows, 1]`; a `limit` of the vocabulary's size excludes nothing."""
    vocabulary = logits.shape[1]
    values, token_ids = logits.topk(width, dim=-1)
    values = values.masked_fill(torch.arange(width, device=logits.device) >= limit, -torch.inf)
    whole = torch.where(limit < vocabulary, values.logsumexp(-1, keepdim=True), logits.logsumexp(-1, keepdim=True))
    shares = (values - whole).exp()
    mass = shares.cumsum(dim=-1)
    values = values.masked_fill((mass - shares >= top_p) & (top_p < 1.0), -torch.inf)
    if min_p is not None:
        ban_unlikely(values, min_p)
    complete = (limit <= width) | ((mass[:, -1:] >= top_p) & (limit == vocabulary) & (top_p < 1.0))
    return Ranked(values, token_ids, complete[:, 0])


def ban_unlikely(logits: torch.Tensor, ratio: torch.Tensor) -> None:
    """Excludes, in place, tokens less likely than `ratio` `[rows, 1]` times a row's likeliest one."""
    least = logits.amax(dim=-1, keepdim=True) + ratio.log()
    logits.masked_fill_(logits < least, -torch.inf)


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
