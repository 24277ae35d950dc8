"""Prompts, sampling parameters and tokens, between messages and values; checked against the model's limits."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TypeAlias

from baton.engine.v1 import decode_pb2, handoff_pb2, prefill_pb2, prompt_pb2
from baton.errors import InvalidRequest, Unsupported
from baton.inference.v1 import generate_pb2, sampling_pb2
from baton.sampling_options import given
from engine_protocol.request_rules import check_params
from grammars.guide import read_guide
from rpc.violations import Violations
from runtime.threads import in_pieces, of_many
from services.engines.answer import FinishReason, FromTiers, PromptLogprobs, TokenLogprob
from services.engines.base import ModelFacts
from services.engines.prompt import Prompt, Retain, Retained, Sampling, Session
from services.requests.bounds import require_cache_keys
from services.requests.loras import read_lora
from services.telemetry.timings import duration

PromptRequest: TypeAlias = (
    prefill_pb2.PrefillRequest
    | decode_pb2.DecodeRequest
    | decode_pb2.AllocateRequest
    | decode_pb2.PrefetchRequest
    | decode_pb2.WarmRequest
)
# The requests for a prompt with a part of its answer.
_CONTINUES = (decode_pb2.DecodeRequest, decode_pb2.WarmRequest)

FINISH_REASONS = {
    FinishReason.END_OF_SEQUENCE: sampling_pb2.FINISH_REASON_END_OF_SEQUENCE,
    FinishReason.STOP_TOKEN: sampling_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
}


async def read_prompt(request: PromptRequest, facts: ModelFacts) -> Prompt:
    """Returns the prompt without its media. Raises InvalidRequest if it has no tokens, or too many for the context."""
    message = request.prompt
    require_cache_keys(message.cache)
    if not message.token_ids:
        raise InvalidRequest.of("prompt.token_ids", "is empty")
    emitted = request.emitted if isinstance(request, _CONTINUES) else ()
    # Before they are copied: 64 MiB of ids would become half a gigabyte.
    if problem := _no_room(len(message.token_ids) + len(emitted), facts):
        raise InvalidRequest.of("prompt.token_ids", problem)
    return Prompt(
        token_ids=await of_many(len(message.token_ids), partial(_copied, message.token_ids)),
        emitted=_copied(emitted),
        cache_salt=message.cache_salt,
        data_parallel_rank=request.data_parallel_rank if request.HasField("data_parallel_rank") else None,
        lora=read_lora(message),
        retain=_retain(message.cache),
        session=_session(message.cache),
    )


def _copied(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(in_pieces(ids)))


def _no_room(tokens: int, facts: ModelFacts) -> str:
    limit = facts.max_context_tokens
    return f"{tokens} tokens leave no room in a context of {limit}" if tokens >= limit else ""


def _retain(cache: prompt_pb2.PromptCache) -> Retain | None:
    if not cache.retain_milliseconds:
        return None
    seconds = cache.retain_milliseconds / 1000
    return Retain(seconds, cache.retain_tokens, cache.retain_priority, cache.tenant)


def _session(cache: prompt_pb2.PromptCache) -> Session | None:
    if not cache.session:
        return None
    return Session(cache.session, cache.parent_session, cache.ends_session, cache.next_in_milliseconds / 1000)


def set_usage(
    message: handoff_pb2.PromptUsage, prompt_tokens: int, cached_tokens: int, retained: Retained | None
) -> None:
    """Sets the usage of a prompt's tokens, in place."""
    message.prompt_tokens, message.cached_tokens = prompt_tokens, cached_tokens
    if retained is not None:
        message.retained_tokens = retained.tokens
        message.retained_until.FromMilliseconds(round(retained.until * 1000))


def set_tiers(message: handoff_pb2.PromptUsage, tiers: FromTiers) -> None:
    """Sets the cached tokens that were loaded from tiers below the pool, or borrowed from a peer, in place."""
    message.host_cached_tokens, message.disk_cached_tokens = tiers.host, tiers.disk
    if tiers.peer_seconds:
        message.peer_cached_tokens = tiers.peer
        message.peer_seconds.CopyFrom(duration(tiers.peer_seconds))
        message.peer_has_none = tiers.peer_has_none


def read_sampling(message: prompt_pb2.Sampling) -> Sampling:
    """Returns the sampling parameters; unset fields get Sampling's defaults.

    Raises InvalidRequest naming every wrong field, and Unsupported for n other than 1 and for words as texts.
    """
    params, stop = message.params, message.stop
    violations = Violations()
    check_params("sampling.params", params, violations)
    _check_stop(stop, violations)
    for index, sequence in enumerate(message.bad_sequences):
        violations.require(bool(sequence.ids), f"sampling.bad_sequences[{index}].ids", "is empty")
    violations.raise_any()
    if params.HasField("n") and params.n != 1:
        raise Unsupported("sampling.params.n: a worker supports n = 1 only")
    if params.bad_words:
        raise Unsupported("sampling.params.bad_words: a worker takes token ids only, as bad_sequences")
    return Sampling(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop_token_ids=frozenset(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        logit_bias=dict(params.logit_bias),
        bad_sequences=tuple(tuple(sequence.ids) for sequence in message.bad_sequences),
        guide=read_guide(message.guided) if message.HasField("guided") else None,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        **given(params),
    )


async def check_limits(facts: ModelFacts, prompt: Prompt, sampling: Sampling) -> None:
    """Raises InvalidRequest naming every field that exceeds the model's limits, and Unsupported for a grammar that the
    model cannot follow.
    """
    violations = Violations()
    await of_many(prompt.num_tokens, partial(_check_ids, facts, prompt, violations))
    _check_sampling(facts, sampling, violations)
    rank = prompt.data_parallel_rank
    if rank is not None and rank >= facts.data_parallel_ranks:
        violations.add("data_parallel_rank", f"{rank} is not below {facts.data_parallel_ranks}")
    violations.raise_any()
    if sampling.guide is not None and not facts.guided_decoding:
        raise Unsupported(f"{facts.name} has no guided decoding")
    if sampling.prompt_logprobs is not None and not facts.prompt_logprobs:
        raise Unsupported(f"sampling.prompt_logprobs: the {facts.engine} engine has no log probabilities of prompts")


def _check_ids(facts: ModelFacts, prompt: Prompt, violations: Violations) -> None:
    violations.token_ids("prompt.token_ids", prompt.token_ids, facts.vocab_size)
    violations.token_ids("emitted", prompt.emitted, facts.vocab_size)
    if problem := _no_room(prompt.num_tokens, facts):
        violations.add("prompt.token_ids", problem)


def _check_sampling(facts: ModelFacts, sampling: Sampling, violations: Violations) -> None:
    violations.token_ids("sampling.stop.stop_token_ids", sorted(sampling.stop_token_ids), facts.vocab_size)
    for token_id in sampling.logit_bias:
        known = token_id < facts.vocab_size
        path = f"sampling.params.logit_bias[{token_id}]"
        violations.require(known, path, f"the vocabulary ends at {facts.vocab_size - 1}")
    for index, sequence in enumerate(sampling.bad_sequences):
        violations.token_ids(f"sampling.bad_sequences[{index}].ids", sequence, facts.vocab_size)
    if sampling.logprobs is not None and sampling.logprobs > facts.max_logprobs:
        violations.add("sampling.logprobs", f"{sampling.logprobs} is over {facts.max_logprobs}")
    if (sampling.prompt_logprobs or 0) > facts.max_logprobs:
        violations.add("sampling.prompt_logprobs", f"{sampling.prompt_logprobs} is over {facts.max_logprobs}")


def prompt_logprobs_message(value: PromptLogprobs | None) -> generate_pb2.PromptLogprobs | None:
    """Converts the log probabilities of a prompt to their message, if there are any."""
    if value is None:
        return None
    return generate_pb2.PromptLogprobs(
        logprobs=value.logprobs, top=value.top, top_token_ids=value.top_ids, top_logprobs=value.top_logprobs
    )


def logprob_message(value: TokenLogprob) -> sampling_pb2.TokenLogprob:
    """Converts the log probabilities of one token to their message."""
    top = [sampling_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in value.top]
    return sampling_pb2.TokenLogprob(token_id=value.token_id, logprob=value.logprob, top=top)


def _check_stop(stop: prompt_pb2.StopConditions, violations: Violations) -> None:
    violations.require(bool(stop.max_tokens), "sampling.stop.max_tokens", "is 0 or unset; at least 1 is needed")
    fits = stop.min_tokens <= stop.max_tokens
    violations.require(fits, "sampling.stop.min_tokens", f"is over max_tokens, {stop.max_tokens}")
