"""Checks of sampling parameters, by routers before a request and by workers again."""

from baton.inference.v1 import sampling_pb2
from baton.sampling_options import OPTIONS, given
from rpc.violations import Violations

MAX_BIAS = 100.0


def check_params(path: str, params: sampling_pb2.SamplingParams, violations: Violations) -> None:
    """Notes each parameter that is set and out of range, below `path`. The length of logit_bias must be bounded."""
    for name, value in given(params).items():
        if problem := OPTIONS[name].problem(value):
            violations.add(f"{path}.{name}", problem)
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
