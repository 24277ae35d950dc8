"""Random numbers that depend only on (seed, position, token id), so that every batch and device samples the same.

Sampling uses the Gumbel-max method: the largest of `logit + noise`. The noise of a token is a 32-bit mixing function of
the token id, keyed twice by the SplitMix64 hash of seed and position. Everything is integer arithmetic that wraps,
except for the last step; so two devices differ at most by the rounding of two logarithms.
"""

import torch

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
