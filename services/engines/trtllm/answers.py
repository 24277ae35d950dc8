"""What an ended generation of TensorRT-LLM says, as our values."""

from collections.abc import Sequence

from rpc.errors import EngineFailed
from services.answer import Finished, FinishReason, TokenLogprob
from services.engine import ModelFacts
from services.engines.trtllm import state
from services.engines.trtllm.generation import Generation
from services.engines.trtllm.pinned import Prefilled
from services.prompt import Prompt

# Reasons of an answer that goes on elsewhere, if it goes on: it has not come to its own end.
_CUT_OFF = ("length", "not_finished")
# How prompts end whose KV is then held, whatever is asked of the engine after that.
COMMITTED = (*_CUT_OFF, "stop")


def prefilled(generation: Generation, facts: ModelFacts, *, hands_over: bool) -> Prefilled:
    """What became of a prompt. Raises what ended the generation, and EngineFailed for an answer that is none."""
    if generation.error is not None:
        raise generation.error
    tokens = generation.take()
    if tokens is None or len(tokens.ids) != 1:
        raise EngineFailed("a prefill of TensorRT-LLM must answer one token")
    has_ended = generation.finish_reason not in _CUT_OFF
    reason = finish_reason(generation, facts.eos_token_ids) if has_ended or not hands_over else None
    params = generation.output.disaggregated_params
    if reason is None and params is None:
        raise EngineFailed("a prefill of TensorRT-LLM did not say where its KV is")
    logprob: TokenLogprob | None = tokens.logprobs[0] if tokens.logprobs else None
    return Prefilled(
        first_token=tokens.ids[0],
        logprob=logprob,
        finish_reason=reason,
        num_tokens=generation.tokens,
        cached_tokens=cached_tokens(generation, facts.layout.block_tokens),
        compute_seconds=(generation.ended_at or generation.submitted_at) - generation.submitted_at,
        state=state.write(params) if reason is None else b"",
    )


def finished(generation: Generation, prompt: Prompt, facts: ModelFacts, *, fetched: bool) -> Finished:
    """The end of an answer. What preceded its first output was the prompt's, unless its KV was fetched."""
    ended = generation.ended_at or generation.submitted_at
    first = generation.first_at or ended
    return Finished(
        reason=finish_reason(generation, facts.eos_token_ids),
        prompt_tokens=len(prompt.token_ids),
        cached_tokens=cached_tokens(generation, facts.layout.block_tokens),
        queue_seconds=0.0,
        prefill_seconds=0.0 if fetched else first - generation.submitted_at,
        decode_seconds=ended - first,
    )


def finish_reason(generation: Generation, eos_token_ids: Sequence[int]) -> FinishReason:
    """Raises EngineFailed for a reason that no request should end by."""
    if generation.finish_reason in _CUT_OFF:
        return FinishReason.LENGTH
    if generation.finish_reason != "stop":
        raise EngineFailed(f"TensorRT-LLM ended the request by {generation.finish_reason!r}")
    stop = generation.output.stop_reason
    ended = stop is None or stop in eos_token_ids
    return FinishReason.END_OF_SEQUENCE if ended else FinishReason.STOP_TOKEN


def cached_tokens(generation: Generation, block_tokens: int) -> int:
    """Of the prompt, by the blocks that were reused; 0 from an engine that does not say."""
    metrics = getattr(generation.output, "request_perf_metrics", None)
    cache = getattr(metrics, "kv_cache_metrics", None)
    reused = int(getattr(cache, "num_reused_blocks", 0) or 0)
    return min(generation.tokens, reused * block_tokens)
