"""Sampling on the device without waiting for it: greedy, and with temperature, top-k, top-p and min-p.

All other options need the host: sampling.py. Both sample the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.engines.prompt import Sampling
from services.engines.pytorch.sampling.sampling import SamplerState, gumbel, row_key
from services.engines.pytorch.sampling.truncation import ban_unlikely, cuts, rank

WIDTH = 1024
"""The number of ranked candidates. A row that needs more is computed again, and sampled by the host."""

GOOD, BROKEN, AGAIN = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Draw:
    """A row to sample: its options, its seed, and the position of its token."""

    row: int
    sampling: Sampling
    seed: int
    position: int


def is_drawable(state: SamplerState, in_flight: int) -> bool:
    """True if the token after `in_flight` more ones can be sampled on the device."""
    options = state.sampling
    return (
        not state.penalises
        and not options.logit_bias
        and not options.bad_sequences
        and options.logprobs is None
        and state.generated + in_flight >= options.min_tokens
        and not state.needs_all_candidates
        and state.guidance is None
    )


def choose(logits: torch.Tensor) -> torch.Tensor:
    """Returns the likeliest id of each row of `[rows, vocabulary]`, and its status, GOOD or BROKEN: `[2, rows]` int64.

    It searches parts of the vocabulary, then their results: one part a row would leave most of a GPU idle. The lowest
    of equally likely ids wins, as in one search.
    """
    rows, vocabulary = logits.shape
    values, ids = logits.view(rows, parts(vocabulary), -1).max(dim=-1)
    best, part = values.max(dim=-1)
    ids = ids.gather(1, part.unsqueeze(1)).squeeze(1) + part * (vocabulary // values.shape[1])
    return torch.stack((ids, (~torch.isfinite(best)).to(torch.int64)))


def parts(vocabulary: int) -> int:
    """Returns the greatest divisor of the vocabulary's size up to 256."""
    return next(count for count in range(min(256, vocabulary), 0, -1) if vocabulary % count == 0)


def draw(logits: torch.Tensor, draws: Sequence[Draw], outcome: torch.Tensor) -> None:
    """Replaces, in the outcome of `choose`, the ids of sampled rows; the status is AGAIN where WIDTH was too little."""
    for cut in (True, False):
        some = [one for one in draws if cuts(one.sampling) is cut]
        if some:
            _draw(logits, some, outcome, cut)


def _draw(logits: torch.Tensor, draws: Sequence[Draw], outcome: torch.Tensor, cut: bool) -> None:
    device, vocabulary = logits.device, logits.shape[1]
    integers = np.array([(one.row, *row_key(one.seed, one.position), _limit(one, vocabulary)) for one in draws])
    reals = np.array([(s.temperature, s.top_p, s.min_p) for s in (one.sampling for one in draws)], dtype=np.float32)
    whole = upload(integers, device)
    rows, keys, limit = whole[:, 0], whole[:, 1:3].to(torch.int32), whole[:, 3:4]
    temperature, top_p, min_p = upload(reals, device).t().unsqueeze(2).unbind()
    scaled = logits[rows].float() / temperature
    ratio = min_p if any(one.sampling.min_p for one in draws) else None
    if not cut:
        if ratio is not None:
            ban_unlikely(scaled, ratio)
        ids = torch.arange(vocabulary, dtype=torch.int32, device=device)
        outcome[0, rows] = (scaled + gumbel(keys, ids)).argmax(dim=-1)
        return
    ranked = rank(scaled, limit, top_p, ratio, min(WIDTH, vocabulary))
    noisy = ranked.logits + gumbel(keys, ranked.token_ids.to(torch.int32))
    outcome[0, rows] = ranked.token_ids.gather(1, noisy.argmax(dim=-1, keepdim=True)).squeeze(1)
    if vocabulary > WIDTH:
        outcome[1, rows] = torch.where(ranked.complete | (outcome[1, rows] == BROKEN), outcome[1, rows], AGAIN)


def _limit(one: Draw, vocabulary: int) -> int:
    return one.sampling.top_k if 0 < one.sampling.top_k < vocabulary else vocabulary


def upload(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copies the array to the device without waiting; keeps the host memory until the copy has read it."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
