"""Reports of log probabilities in our words. Engines have mappings of token ids to objects with a `logprob`."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.engines.answer import PromptLogprobs, TokenLogprob


def token_logprob(token_id: int, report: Mapping[int, Any] | float, top: int) -> TokenLogprob:
    """Converts a report of the likeliest tokens and the sampled one, wherever it ranks; or of its number alone."""
    if isinstance(report, float):
        return TokenLogprob(token_id, report)
    return TokenLogprob(token_id, float(report[token_id].logprob), _likeliest(report, top))


def prompt_logprobs(token_ids: Sequence[int], reports: Sequence[Mapping[int, Any] | None], top: int) -> PromptLogprobs:
    """Converts one report for each token of a prompt, of which the first is empty. Each has at least `top` tokens."""
    pairs = list(zip(token_ids, reports, strict=False))[1:]
    told = [token_logprob(token_id, report or {}, top) for token_id, report in pairs]
    return PromptLogprobs(
        logprobs=tuple(each.logprob for each in told),
        top=top,
        top_ids=tuple(token_id for each in told for token_id, _ in each.top),
        top_logprobs=tuple(logprob for each in told for _, logprob in each.top),
    )


def _likeliest(report: Mapping[int, Any], top: int) -> tuple[tuple[int, float], ...]:
    ranked = sorted(report.items(), key=lambda item: -item[1].logprob)
    return tuple((token_id, float(value.logprob)) for token_id, value in ranked[:top])
