"""The ranges of sampling parameters, which routers check before a request and workers check again."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from baton.inference.v1 import sampling_pb2
from rpc.violations import Violations

MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers from `low` to `high`, both included; without 0 where it `excludes_zero`."""

    low: float
    high: float = math.inf
    excludes_zero: bool = False


Parameter = Literal["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]

RANGES: Mapping[Parameter, Range] = {
    "temperature": Range(0),
    "top_p": Range(0, 1, excludes_zero=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, excludes_zero=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}


def check_params(path: str, params: sampling_pb2.SamplingParams, violations: Violations) -> None:
    """Notes each parameter that is set and out of range, below `path`. The length of logit_bias must be bounded."""
    for name, allowed in RANGES.items():
        if not params.HasField(name):
            continue
        value = getattr(params, name)
        violations.number(f"{path}.{name}", value, allowed.low, allowed.high)
        violations.require(not (allowed.excludes_zero and value == 0), f"{path}.{name}", "must be above 0")
    for token_id, bias in params.logit_bias.items():
        if not abs(bias) <= MAX_BIAS:
            violations.number(f"{path}.logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)
            if violations.is_full:
                return


def check_bias_ids(path: str, params: sampling_pb2.SamplingParams, vocab_size: int, violations: Violations) -> None:
    """Notes each token of logit_bias that the vocabulary does not have, below `path`."""
    for token_id in params.logit_bias:
        if token_id >= vocab_size:
            violations.add(f"{path}.logit_bias[{token_id}]", f"the vocabulary ends at {vocab_size - 1}")
            if violations.is_full:
                return
