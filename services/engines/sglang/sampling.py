"""Our sampling parameters in SGLang's words, one to one; what SGLang would change silently is refused."""

from collections.abc import Mapping
from typing import Any

from baton.errors import Unsupported
from baton.sampling_options import OPTIONS
from services.engines.prompt import Sampling
from services.engines.sglang.config import SglangArguments

_SEED_BITS = 63
# What SGLang names as we do, and its neutral value, which is left out.
_OPTIONS: Mapping[str, float] = {
    name: OPTIONS[name].row.neutral or 0.0
    for name in ("top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
}
# It takes temperatures below this as greedy.
_LOWEST_TEMPERATURE = 1e-6
# SGLang has more, but one of them ends its scheduler by an assertion if the request has a seed.
_OTHERS = ("temperature", "top_k", "seed")
_REFUSED = tuple(name for name in OPTIONS if name not in (*_OPTIONS, *_OTHERS))
# Without its own tokenizer it has no min_new_tokens.
_LACKING = ("bad_words", "min_tokens", *_REFUSED)


def unsupported_options(args: SglangArguments) -> tuple[str, ...]:
    """Returns the fields of SamplingParams that requests may not use."""
    return tuple(sorted(_LACKING if args.enable_deterministic_inference else (*_LACKING, "seed")))


def check_sampling(sampling: Sampling, unsupported: tuple[str, ...]) -> None:
    """Raises Unsupported for what SGLang lacks, or would replace by something else."""
    if sampling.bad_sequences:
        raise Unsupported("sampling.bad_sequences: the sglang engine does not have bad_words")
    if sampling.guide is not None:
        raise Unsupported("guided: the sglang engine follows no grammars")
    if sampling.prompt_logprobs is not None:
        raise Unsupported("prompt_logprobs: the sglang engine does not report them")
    for name in _REFUSED:
        if getattr(sampling, name) != (OPTIONS[name].row.neutral or 0.0):
            raise Unsupported(f"sampling.params.{name}: the sglang engine does not have it")
    if sampling.min_tokens:
        raise Unsupported("stopping.min_tokens: SGLang needs its own tokenizer for it, which is not loaded")
    if "seed" in unsupported and sampling.seed is not None and sampling.temperature > 0:
        raise Unsupported("sampling.params.seed: seeds count only with args.enable_deterministic_inference")
    if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
        raise Unsupported(f"sampling.params.temperature: {sampling.temperature}, which SGLang takes as 0")


def sampling_params(sampling: Sampling, max_tokens: int, ends: tuple[int, ...]) -> dict[str, Any]:
    """Returns SGLang's parameters. `ends` are the ends of sequence: its own checks would be off with ignore_eos, and
    stop tokens with them, so all are stop tokens.
    """
    stops = sampling.stop_token_ids.union(() if sampling.ignore_eos else ends)
    params: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": sorted(stops),
        "ignore_eos": False,
        "skip_special_tokens": False,
        **{name: value for name, neutral in _OPTIONS.items() if (value := getattr(sampling, name)) != neutral},
    }
    if sampling.top_k:
        params["top_k"] = sampling.top_k
    if sampling.seed is not None and sampling.temperature > 0:
        params["sampling_seed"] = sampling.seed % 2**_SEED_BITS
    if sampling.logit_bias:
        params["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    return params
