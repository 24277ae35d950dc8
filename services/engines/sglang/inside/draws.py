"""Draws by seeds that do not depend on the rest of the batch.

SGLang adds the noise of a seed to the tokens of the vocabulary, or, if any request of the batch has a top-k or top-p,
to their ranks: a greedy request, whose top-k is 1, changes the tokens that those beside it draw. Here the noise belongs
to the tokens in both cases.
"""

import importlib
from typing import Any


def change() -> None:
    """Applies the change. Call it once, before a model runs."""
    sampler: Any = importlib.import_module("sglang.srt.layers.sampler")
    from_all, from_some = sampler.sampling_from_probs_torch, sampler.top_k_top_p_min_p_sampling_from_probs_torch

    def draw(probs: Any, seeds: Any, positions: Any) -> Any:
        return sampler.multinomial_with_seed(probs.double().log_(), seeds, positions).view(-1).int()

    def draw_from_all(probs: Any, sampling_seed: Any = None, positions: Any = None) -> Any:
        return from_all(probs) if sampling_seed is None else draw(probs, sampling_seed, positions)

    def draw_from_some(
        probs: Any, top_ks: Any, top_ps: Any, min_ps: Any, needs_min_p: bool, seeds: Any, positions: Any
    ) -> Any:
        if seeds is None or needs_min_p:
            return from_some(probs, top_ks, top_ps, min_ps, needs_min_p, seeds, positions)
        return draw(kept(probs, top_ks, top_ps), seeds, positions)

    sampler.sampling_from_probs_torch = draw_from_all
    sampler.top_k_top_p_min_p_sampling_from_probs_torch = draw_from_some


def kept(probs: Any, top_ks: Any, top_ps: Any) -> Any:
    """Returns `probs`, [sequences, vocabulary], with 0 for tokens beyond top-k or top-p. Of equals the first stay."""
    torch = importlib.import_module("torch")
    falling, order = probs.sort(dim=-1, descending=True, stable=True)
    before = falling.double().cumsum(dim=-1) - falling
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    left_out = (ranks >= top_ks.view(-1, 1)) | ((before > top_ps.view(-1, 1)) & (top_ps.view(-1, 1) < 1))
    return torch.zeros_like(probs).scatter_(-1, order, falling.masked_fill(left_out, 0))
