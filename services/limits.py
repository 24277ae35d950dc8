"""What a model can take, checked before its engine is asked."""

from rpc.errors import FieldViolation, InvalidRequest
from services.engine import ModelFacts
from services.prompt import Prompt, Sampling


def check(facts: ModelFacts, prompt: Prompt, sampling: Sampling) -> None:
    """Raises InvalidRequest naming every field that is beyond the model's limits."""
    violations = [
        *_beyond_vocabulary("prompt.token_ids", prompt.token_ids, facts.vocab_size),
        *_beyond_vocabulary("emitted", prompt.emitted, facts.vocab_size),
        *_beyond_vocabulary("sampling.stop.stop_token_ids", tuple(sampling.stop_token_ids), facts.vocab_size),
        *_beyond_vocabulary("sampling.params.logit_bias", tuple(sampling.logit_bias), facts.vocab_size),
    ]
    if len(prompt.context) >= facts.max_context_tokens:
        text = f"{len(prompt.context)} tokens leave no room in a context of {facts.max_context_tokens}"
        violations.append(FieldViolation("prompt.token_ids", text))
    rank = prompt.data_parallel_rank
    if rank is not None and rank >= facts.data_parallel_ranks:
        violations.append(FieldViolation("data_parallel_rank", f"{rank} is not below {facts.data_parallel_ranks}"))
    if sampling.logprobs is not None and sampling.logprobs > facts.max_logprobs:
        violations.append(FieldViolation("sampling.logprobs", f"{sampling.logprobs} is over {facts.max_logprobs}"))
    if violations:
        raise InvalidRequest(violations)


def _beyond_vocabulary(field: str, ids: tuple[int, ...], vocab_size: int) -> list[FieldViolation]:
    if not ids or max(ids) < vocab_size:
        return []
    index = next(index for index, token_id in enumerate(ids) if token_id >= vocab_size)
    return [FieldViolation(f"{field}[{index}]", f"{ids[index]} is outside the vocabulary of {vocab_size}")]
