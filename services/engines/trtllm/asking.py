"""From Sampling to TensorRT-LLM's SamplingParams: all of it, or a refusal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rpc.errors import Unsupported
from services.engines.trtllm.package import Package
from services.prompt import Sampling


@dataclass(frozen=True, slots=True)
class Budget:
    """How many ids a request may still have, and how many it must have before an end of sequence counts."""

    max_tokens: int
    min_tokens: int


def sampling_params(package: Package, sampling: Sampling, budget: Budget, eos_token_ids: Sequence[int]) -> Any:
    """What the engine is asked for. Raises Unsupported naming what this version has no parameter for."""
    if sampling.logit_bias:
        raise Unsupported("sampling.params.logit_bias: the trtllm engine does not have it")
    end_id, *more_ends = eos_token_ids
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else more_ends)}
    wanted = {
        # Without a tokenizer the engine does not know it.
        "end_id": end_id,
        "pad_id": end_id,
        "max_tokens": budget.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "n": 1,
        "detokenize": False,
        "add_special_tokens": False,
        "ignore_eos": sampling.ignore_eos,
        "include_stop_str_in_output": True,
        **_if_unlike(sampling),
    }
    if stops:
        wanted["stop_token_ids"] = sorted(stops)
    if budget.min_tokens > 0:
        wanted["min_tokens"] = budget.min_tokens
    if sampling.logprobs is not None:
        # 0 would switch them off, and 1 is the sampled token's.
        wanted["logprobs"] = max(1, sampling.logprobs)
    if unknown := sorted(set(wanted) - package.sampling_arguments):
        raise Unsupported(f"TensorRT-LLM {package.version} cannot sample by {', '.join(unknown)}")
    return package.sampling_params(**wanted)


def _if_unlike(sampling: Sampling) -> dict[str, Any]:
    """Only what differs from what it is without it, so that a version that lacks it is still of use."""
    neutral = {
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    return {name: getattr(sampling, name) for name, value in neutral.items() if getattr(sampling, name) != value}
