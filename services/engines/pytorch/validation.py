"""Checks of a request before the engine takes it."""

from collections.abc import Iterable

from baton.errors import FieldViolation, InvalidRequest
from baton.sampling_options import OPTIONS
from services.engines.base import ModelFacts
from services.engines.prompt import Prompt, Sampling


def check_prompt(prompt: Prompt, facts: ModelFacts) -> None:
    """Raises InvalidRequest if the prompt is empty, too long for the context, or has ids outside the vocabulary."""
    if not prompt.token_ids:
        raise InvalidRequest.of("prompt", "must not be empty")
    if len(prompt.token_ids) >= facts.max_context_tokens:
        raise InvalidRequest.of(
            "prompt", f"has {len(prompt.token_ids)} tokens; with an answer it must fit in {facts.max_context_tokens}"
        )
    for field, ids in (("prompt", prompt.token_ids), ("emitted", prompt.emitted)):
        if ids and not 0 <= min(ids) <= max(ids) < facts.vocab_size:
            raise InvalidRequest.of(field, f"has token ids outside the vocabulary of {facts.vocab_size}")


def check_sampling(sampling: Sampling, facts: ModelFacts) -> None:
    """Raises InvalidRequest naming every option that is out of range."""
    rules = (
        ("sampling.max_tokens", sampling.max_tokens >= 1, "must be at least 1"),
        ("sampling.min_tokens", sampling.min_tokens >= 0, "must not be negative"),
        (
            "sampling.logit_bias",
            _within(sampling.logit_bias, facts),
            f"has ids outside the vocabulary of {facts.vocab_size}",
        ),
        (
            "sampling.bad_sequences",
            all(_within(sequence, facts) for sequence in sampling.bad_sequences),
            f"has ids outside the vocabulary of {facts.vocab_size}",
        ),
        (
            "sampling.bad_sequences",
            not sampling.bad_sequences or _most_banned(sampling, facts) < facts.vocab_size,
            f"with the ends of the answer could ban all tokens of the vocabulary of {facts.vocab_size}",
        ),
        (
            "sampling.stop_token_ids",
            _within(sampling.stop_token_ids, facts),
            f"has ids outside the vocabulary of {facts.vocab_size}",
        ),
        (
            "prompt_logprobs",
            0 <= (sampling.prompt_logprobs or 0) <= facts.max_logprobs,
            f"must be at most {facts.max_logprobs}",
        ),
        ("logprobs", 0 <= (sampling.logprobs or 0) <= facts.max_logprobs, f"must be at most {facts.max_logprobs}"),
    )
    violations = [FieldViolation(field, text) for field, holds, text in rules if not holds]
    for option in OPTIONS.values():
        value = getattr(sampling, option.name)
        if value is not None and (problem := option.problem(value)):
            violations.append(FieldViolation(f"sampling.{option.name}", problem))
    if violations:
        raise InvalidRequest(violations)


def _most_banned(sampling: Sampling, facts: ModelFacts) -> int:
    """Returns how many tokens may be banned at one position: one by each sequence, and each that ends the answer."""
    return len(sampling.bad_sequences) + len(sampling.stop_token_ids) + len(facts.eos_token_ids)


def _within(ids: Iterable[int], facts: ModelFacts) -> bool:
    return all(0 <= token < facts.vocab_size for token in ids)
