"""The reason for which a request of vLLM ended, and its first token, in our words."""

from baton.errors import EngineFailed
from services.engines.answer import Finished, FinishReason
from services.engines.base import ModelFacts
from services.engines.external.held_kv import ExternalPrefill
from services.engines.prompt import Prompt, Sampling
from services.engines.vllm.handoff import Remembered, write_state
from services.engines.vllm.requests.generation import VllmGeneration


def finish_reason(generation: VllmGeneration, sampling: Sampling, facts: ModelFacts) -> FinishReason:
    """Converts the reason of the end. Raises EngineFailed for one that no request should end by."""
    if generation.finish_reason == "length":
        return FinishReason.LENGTH
    if generation.finish_reason != "stop":
        raise EngineFailed(f"vLLM ended the request by {generation.finish_reason!r}")
    last = generation.ids[-1] if generation.ids else None
    ends = last in facts.eos_token_ids and not sampling.ignore_eos
    return FinishReason.END_OF_SEQUENCE if ends else FinishReason.STOP_TOKEN


def finished(
    generation: VllmGeneration, prompt: Prompt, sampling: Sampling, facts: ModelFacts, *, fetched: bool
) -> Finished:
    """Returns the end of an answer, with the seconds of its stages by vLLM's clock."""
    stages = generation.stages()
    return Finished(
        reason=finish_reason(generation, sampling, facts),
        prompt_tokens=len(prompt.token_ids),
        # With KV of another worker vLLM counts what was cached there.
        cached_tokens=0 if fetched else min(generation.cached_tokens, len(prompt.token_ids)),
        queue_seconds=stages.queue_seconds,
        prefill_seconds=0.0 if fetched else stages.prefill_seconds,
        decode_seconds=stages.decode_seconds,
    )


def prefilled(
    generation: VllmGeneration, prompt: Prompt, sampling: Sampling, facts: ModelFacts, remembered: Remembered | None
) -> ExternalPrefill:
    """Returns the result of a prefill. vLLM holds its KV unless the first token ended the request.

    `remembered` is None if no token may follow. Raises EngineFailed if vLLM does not say where the KV is.
    """
    first_token, logprob = generation.first()
    reason: FinishReason | None = finish_reason(generation, sampling, facts)
    params, state = generation.kv_transfer or {}, b""
    if reason is FinishReason.LENGTH and remembered is not None:
        reason, state = None, write_state(params, facts.layout.block_tokens, remembered)
    stages = generation.stages()
    return ExternalPrefill(
        first_token=first_token,
        logprob=logprob,
        finish_reason=reason,
        num_tokens=prompt.num_tokens,
        cached_tokens=min(generation.cached_tokens, prompt.num_tokens),
        queue_seconds=stages.queue_seconds,
        compute_seconds=stages.prefill_seconds,
        prompt_logprobs=generation.prompt_logprobs,
        engine_state=state,
    )
