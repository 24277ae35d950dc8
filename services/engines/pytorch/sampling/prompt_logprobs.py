"""The log probabilities of a prompt's own tokens, collected while its chunks are computed."""

from collections.abc import Sequence

import torch

from services.engines.answer import PromptLogprobs
from services.engines.prompt import Prompt, Sampling

LARGEST_CHUNK = 256
"""Tokens of a chunk whose logits are all needed; more would take much memory for a large vocabulary."""


class PromptReport:
    """The report of one prompt. A chunk that is computed again replaces what it said before."""

    __slots__ = ("_found", "_tokens", "_top")

    def __init__(self, token_ids: Sequence[int], top: int) -> None:
        self._tokens = token_ids
        self._top = top
        # For each token but the first: its log probability, and the ids and log probabilities of the likeliest.
        self._found: list[tuple[float, list[int], list[float]]] = [(0.0, [], [])] * (len(token_ids) - 1)

    @classmethod
    def of(cls, prompt: Prompt, sampling: Sampling) -> "PromptReport | None":
        """Returns the report that is asked for; None if none is, or if the client has it: tokens were emitted."""
        if sampling.prompt_logprobs is None or prompt.emitted:
            return None
        return cls(prompt.token_ids, sampling.prompt_logprobs)

    def count(self, start: int, end: int) -> int:
        """Returns how many of the positions `start:end` precede a token of the prompt."""
        return max(0, min(end, len(self._found)) - start)

    def add(self, start: int, logits: torch.Tensor) -> None:
        """Adds the logits `[positions, vocabulary]` of the positions from `start` on."""
        logprobs = logits.float().log_softmax(dim=-1)
        following = torch.tensor(self._tokens[start + 1 : start + 1 + len(logits)], device=logits.device)
        own = logprobs.gather(1, following.unsqueeze(1)).squeeze(1).tolist()
        top = logprobs.topk(self._top, dim=-1)
        rows = zip(own, top.indices.tolist(), top.values.tolist(), strict=True)
        self._found[start : start + len(logits)] = rows

    def finished(self) -> PromptLogprobs:
        """Returns the whole report."""
        return PromptLogprobs(
            logprobs=tuple(own for own, _, _ in self._found),
            top=self._top,
            top_ids=tuple(one for _, ids, _ in self._found for one in ids),
            top_logprobs=tuple(one for _, _, values in self._found for one in values),
        )
