"""Samples the next tokens of a batch from its logits.

Random numbers depend only on (seed, position, token id), so that every batch and device samples the same: by the
Gumbel-max method, the largest of `logit + noise`. The noise of a token is a 32-bit mixing function of the token id,
keyed twice by the SplitMix64 hash of seed and position. Everything is integer arithmetic that wraps, except for the
last step; so two devices differ at most by the rounding of two logarithms.
"""

import copy
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.engines.answer import TokenLogprob
from services.engines.bad_words import BadWords
from services.engines.guidance.guidance import Guidance, Words
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.sampling import truncation

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15
# Signed forms of the multipliers of Ellis' `lowbias32`, and of the 32-bit golden ratio.
_FIRST, _SECOND, _GOLDEN = 0x7FEB352D, 0x846CA68B - (1 << 32), 0x9E3779B1 - (1 << 32)
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def _splitmix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Returns two signed 32-bit keys for the token at `position`, which counts from the start of the prompt."""
    mixed = _splitmix((_splitmix((seed + _WEYL) & _MASK) + (position + 1) * _WEYL) & _MASK)
    return _signed(mixed & 0xFFFFFFFF), _signed(mixed >> 32)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns Gumbel noise `[rows, n]` in float32, from keys `[rows, 2]` and ids `[n]` or `[rows, n]`, both int32."""
    bits = token_ids * _GOLDEN + keys[:, :1]
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _FIRST
    bits ^= (bits >> 15) & 0x1FFFF
    bits += keys[:, 1:]
    bits *= _SECOND
    bits ^= (bits >> 16) & 0xFFFF
    uniform = (bits & 0x7FFFFFFF).to(torch.float32)
    # The fine steps are near 0, where log1p keeps them: that is the tail that matters.
    uniform.add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


class SamplerState:
    """The state that sampling keeps from one token of a request to the next."""

    __slots__ = (
        "_bad_words",
        "_counts",
        "_prompt",
        "_seen",
        "ends",
        "guidance",
        "needs_all_candidates",
        "position",
        "sampling",
        "seed",
    )

    def __init__(self, prompt: Prompt, sampling: Sampling, eos_token_ids: frozenset[int]) -> None:
        self._prompt = prompt
        self.sampling = sampling
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self.ends = sorted(sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos_token_ids))
        self.position = prompt.num_tokens
        # Set before the request is submitted, if its answer follows a grammar.
        self.guidance: Guidance | None = None
        # Set once the likeliest candidates were not enough to draw from.
        self.needs_all_candidates = False
        self._bad_words = BadWords(sampling.bad_sequences, prompt.emitted) if sampling.bad_sequences else None
        self._counts: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None

    @property
    def generated(self) -> int:
        """The number of ids after the prompt so far."""
        return self.position - len(self._prompt.token_ids)

    @property
    def penalises(self) -> bool:
        """True if earlier tokens change the logits."""
        options = self.sampling
        return options.repetition_penalty != 1.0 or options.presence_penalty != 0.0 or options.frequency_penalty != 0.0

    @property
    def is_plain(self) -> bool:
        """True if the likeliest token is the result, whatever the other options are."""
        return (
            self.sampling.temperature == 0.0
            and not self.penalises
            and not self.sampling.logit_bias
            and self._bad_words is None
            and self.sampling.logprobs is None
            and self.generated >= self.sampling.min_tokens
            and self.guidance is None
        )

    @property
    def banned(self) -> set[int]:
        """The tokens that must not come now: those that end the answer too early, or complete bad words."""
        banned = set(self.ends) if self.generated < self.sampling.min_tokens else set()
        if self._bad_words is not None:
            banned |= self._bad_words.banned()
        return banned.union(self.guidance.eos_token_ids) if self.guidance and self.sampling.ignore_eos else banned

    def history(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns how often each id was generated, and which ids occur at all, for logits of the shape and device of
        `like`.
        """
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros_like(like)
            self._seen = torch.zeros_like(like, dtype=torch.bool)
            self._seen[torch.tensor(self._prompt.context, device=like.device)] = True
            for token in self._prompt.emitted:
                self._counts[token] += 1
        return self._counts, self._seen

    def append(self, token_id: int) -> None:
        """Records a sampled token."""
        self.position += 1
        if self._bad_words is not None:
            self._bad_words = self._bad_words.after((token_id,))
        if self.guidance is not None:
            self.guidance.append(token_id)
        if self._counts is not None and self._seen is not None:
            self._counts[token_id] += 1
            self._seen[token_id] = True

    def ahead(self, drafts: Sequence[int]) -> "SamplerState":
        """The state after these drafts, if they are confirmed. Not for penalties and grammars, and not to append to."""
        later = copy.copy(self)
        later.position += len(drafts)
        if self._bad_words is not None:
            later._bad_words = self._bad_words.after(drafts)
        return later


@dataclass(frozen=True, slots=True)
class Chosen:
    """The result for one row; `token_id` is None if the logits were not numbers.

    A result that is not settled must be discarded: the row has to be computed again, with all candidates.
    `more` are the results of later rows, if the tokens before them were drafts that proved right.
    """

    token_id: int | None
    logprob: TokenLogprob | None = None
    is_unsettled: bool = False
    more: "tuple[Chosen, ...]" = ()


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[Chosen]:
    """Samples a token for each row of `logits` `[rows, vocabulary]`, float32, which it may overwrite.

    The result of a row does not depend on the other rows.
    """
    if all(state.is_plain for state in states):
        values, ids = logits.max(dim=-1)
        return [Chosen(token if good else None) for token, good in zip(ids.tolist(), _numbers(values), strict=True)]
    good = _numbers(logits.amax(dim=-1))
    reports = _logprob_reports(logits, states)
    _adjust(logits, states)
    _apply_masks(logits, _masks(states))
    chosen = _choose(logits, states)
    return [
        Chosen(token, report(token) if report else None) if fine else Chosen(None)
        for token, report, fine in zip(chosen, reports, good, strict=True)
    ]


def _numbers(values: torch.Tensor) -> list[bool]:
    finite: list[bool] = torch.isfinite(values).tolist()
    return finite


def _logprob_reports(
    logits: torch.Tensor, states: Sequence[SamplerState]
) -> list[Callable[[int], TokenLogprob] | None]:
    """Returns, for each row that requested log probabilities, a function from its sampled id to them, before any
    change.
    """
    reports: list[Callable[[int], TokenLogprob] | None] = [None] * len(states)
    rows = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
    if not rows:
        return reports
    logprobs = logits[torch.tensor(rows, device=logits.device)].log_softmax(dim=-1)
    widest = max(states[row].sampling.logprobs or 0 for row in rows)
    top = logprobs.topk(widest, dim=-1)
    for index, (row, values, ids) in enumerate(zip(rows, top.values.tolist(), top.indices.tolist(), strict=True)):
        count = states[row].sampling.logprobs or 0
        rivals = tuple(zip(ids[:count], values[:count], strict=True))
        reports[row] = _Report(logprobs[index], rivals)
    return reports


@dataclass(frozen=True, slots=True)
class _Report:
    logprobs: torch.Tensor
    rivals: tuple[tuple[int, float], ...]

    def __call__(self, token_id: int) -> TokenLogprob:
        return TokenLogprob(token_id, float(self.logprobs[token_id]), self.rivals)


def _adjust(logits: torch.Tensor, states: Sequence[SamplerState]) -> None:
    """Applies penalties, biases and bans, in place; row by row, since few rows use any."""
    for row, state in zip(logits, states, strict=True):
        options = state.sampling
        if state.penalises:
            _penalise(row, state)
        if options.logit_bias:
            ids = torch.tensor(list(options.logit_bias), device=row.device)
            row[ids] += torch.tensor(list(options.logit_bias.values()), device=row.device)
        # Of a guided answer, the mask of its grammar has them.
        if state.guidance is None and (banned := state.banned):
            row[torch.tensor(sorted(banned), device=row.device)] = -torch.inf


def _masks(states: Sequence[SamplerState]) -> dict[int, Words]:
    """Returns the masks of guided rows; a row whose grammar has failed has none, and its token is not used."""
    masks = {row: state.guidance.mask(state.banned) for row, state in enumerate(states) if state.guidance is not None}
    return {row: mask for row, mask in masks.items() if mask is not None}


def _penalise(row: torch.Tensor, state: SamplerState) -> None:
    options = state.sampling
    counts, seen = state.history(row)
    if options.repetition_penalty != 1.0:
        repeated = torch.where(row > 0, row / options.repetition_penalty, row * options.repetition_penalty)
        row.copy_(torch.where(seen, repeated, row))
    if options.frequency_penalty != 0.0:
        row.sub_(counts, alpha=options.frequency_penalty)
    if options.presence_penalty != 0.0:
        row.sub_((counts > 0).to(row.dtype), alpha=options.presence_penalty)


def _apply_masks(logits: torch.Tensor, masks: dict[int, Words]) -> None:
    """Excludes, in place, what the masks of rows do not allow in `logits` `[rows, vocabulary]`."""
    if not masks:
        return
    packed = torch.from_numpy(np.stack(list(masks.values())).view(np.uint8)).to(logits.device)
    rows = torch.tensor(list(masks), device=logits.device)
    bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=logits.device)
    is_banned = (packed.unsqueeze(-1) & bits).view(len(masks), -1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill(is_banned, -torch.inf)


def _choose(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[int]:
    """Returns the likeliest id of greedy rows, and a random one of the others."""
    ids: list[int] = logits.argmax(dim=-1).tolist()
    cut = [
        row for row, state in enumerate(states) if state.sampling.temperature > 0 and truncation.cuts(state.sampling)
    ]
    whole = [
        row
        for row, state in enumerate(states)
        if state.sampling.temperature > 0 and not truncation.cuts(state.sampling)
    ]
    for rows, draw in ((cut, _draw_cut), (whole, _draw_whole)):
        if rows:
            drawn = draw(_scaled(logits, rows, states), [states[row] for row in rows])
            for row, token in zip(rows, drawn.tolist(), strict=True):
                ids[row] = token
    return ids


def _scaled(logits: torch.Tensor, rows: Sequence[int], states: Sequence[SamplerState]) -> torch.Tensor:
    temperatures = _column(logits, [states[row].sampling.temperature for row in rows])
    return logits[torch.tensor(rows, device=logits.device)] / temperatures


def _draw_whole(logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
    """Samples from the whole vocabulary, a few rows at a time so that the noise stays in the processor's cache."""
    truncation.apply_min_p(logits, [state.sampling for state in states])
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    keys = _keys(logits, states)
    rows = max(1, (1 << 16) // logits.shape[1]) if logits.device.type == "cpu" else len(states)
    starts = range(0, len(states), rows)
    return torch.cat([(logits[a : a + rows] + gumbel(keys[a : a + rows], ids)).argmax(dim=-1) for a in starts])


def _draw_cut(logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
    """Samples from the likeliest tokens only: ranks few first, and more for rows where those are not all."""
    keys = _keys(logits, states)
    drawn = torch.zeros(len(states), dtype=torch.int64, device=logits.device)
    open_rows = list(range(len(states)))
    for width in truncation.widths(logits.shape[1]):
        index = torch.tensor(open_rows, device=logits.device)
        kept = truncation.keep(logits[index], [states[row].sampling for row in open_rows], width)
        noisy = kept.logits + gumbel(keys[index], kept.token_ids.to(torch.int32))
        # Rows that are not complete are sampled again with more candidates.
        drawn[index] = kept.token_ids.gather(1, noisy.argmax(dim=-1, keepdim=True)).squeeze(1)
        open_rows = [row for row, complete in zip(open_rows, kept.complete, strict=True) if not complete]
        if not open_rows:
            break
    return drawn


def _keys(logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
    keys = [row_key(state.seed, state.position) for state in states]
    return torch.tensor(keys, dtype=torch.int32, device=logits.device)


def _column(logits: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=logits.dtype, device=logits.device).unsqueeze(1)
