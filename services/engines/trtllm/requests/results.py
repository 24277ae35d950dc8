"""Converts the end of a generation into our values, and a handoff's DisaggregatedParams into bytes and back.

Both directions of the state fail closed: a field that has a value and no place on the other side is an error, since KV
that is described incompletely can stall every request of the engine that fetches it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from baton.engine.v1 import trtllm_state_pb2
from baton.errors import EngineFailed, InvalidRequest, LayoutMismatch, Unsupported
from services.engines.answer import Finished, FinishReason, TokenLogprob
from services.engines.base import ModelFacts
from services.engines.external.held_kv import ExternalPrefill
from services.engines.prompt import Prompt, Sampling
from services.engines.trtllm.package import Package
from services.engines.trtllm.requests.inflight import InflightGeneration

# TensorRT-LLM checks for the first end of sequence, then for the length, then for stop words. So a prefill, whose
# length is one token, ends by its length even if that token is a stop word. Only then its KV is held.
_CUT_OFF = ("length", "not_finished")


def holds_kv(generation: InflightGeneration) -> bool:
    """True if the engine holds the KV of a prompt that ran for a handoff; an abort does not free it."""
    return generation.finish_reason in _CUT_OFF


def prefilled(
    generation: InflightGeneration, prompt: Prompt, sampling: Sampling, facts: ModelFacts, *, hands_over: bool
) -> ExternalPrefill:
    """Converts the end of a prefill. Raises the generation's error, and EngineFailed for an answer without a token."""
    if generation.error is not None:
        raise generation.error
    first_token, logprob = _first_token(generation, facts)
    reason: FinishReason | None = finish_reason(generation, prompt, sampling, facts)
    if reason is FinishReason.LENGTH and hands_over:
        reason = None
    params = generation.output.disaggregated_params
    if reason is None and params is None:
        raise EngineFailed("a prefill of TensorRT-LLM did not say where its KV is")
    return ExternalPrefill(
        first_token=first_token,
        logprob=logprob,
        finish_reason=reason,
        num_tokens=generation.tokens,
        cached_tokens=cached_tokens(generation, prompt, facts.layout.block_tokens),
        compute_seconds=(generation.ended_at or generation.submitted_at) - generation.submitted_at,
        engine_state=write_state(params) if reason is None else b"",
    )


def finished(
    generation: InflightGeneration, prompt: Prompt, sampling: Sampling, facts: ModelFacts, *, fetched: bool
) -> Finished:
    """Returns the end of an answer. The time before its first output is the prompt's, unless its KV was fetched."""
    ended = generation.ended_at or generation.submitted_at
    first = generation.first_at or ended
    return Finished(
        reason=finish_reason(generation, prompt, sampling, facts),
        prompt_tokens=len(prompt.token_ids),
        cached_tokens=cached_tokens(generation, prompt, facts.layout.block_tokens),
        queue_seconds=0.0,
        prefill_seconds=0.0 if fetched else first - generation.submitted_at,
        decode_seconds=ended - first,
    )


def finish_reason(
    generation: InflightGeneration, prompt: Prompt, sampling: Sampling, facts: ModelFacts
) -> FinishReason:
    """Converts the reason of the end. Raises EngineFailed for one that no request should end by."""
    if generation.finish_reason in _CUT_OFF:
        return _reason_of_last_token(generation, prompt, sampling, facts) or FinishReason.LENGTH
    if generation.finish_reason != "stop":
        raise EngineFailed(f"TensorRT-LLM ended the request by {generation.finish_reason!r}")
    stop = generation.output.stop_reason
    ended = stop is None or stop in facts.eos_token_ids
    return FinishReason.END_OF_SEQUENCE if ended else FinishReason.STOP_TOKEN


def cached_tokens(generation: InflightGeneration, prompt: Prompt, block_tokens: int) -> int:
    """Returns the cached tokens of the prompt: exact for text, else by the reused blocks, counted in every window."""
    exact = getattr(generation.result, "cached_tokens", None)
    if isinstance(exact, int) and not prompt.media:
        return min(generation.tokens, exact)
    metrics = getattr(generation.output, "request_perf_metrics", None)
    cache = getattr(metrics, "kv_cache_metrics", None)
    reused = int(getattr(cache, "num_reused_blocks", 0) or 0)
    return min(generation.tokens, reused * block_tokens)


def _first_token(generation: InflightGeneration, facts: ModelFacts) -> tuple[int, TokenLogprob | None]:
    tokens = generation.pull()
    if tokens is None and generation.finish_reason == "stop":
        # It is not known whether every version repeats the end of sequence that it ended by.
        return facts.eos_token_ids[0], None
    if tokens is None or len(tokens.ids) != 1:
        raise EngineFailed("a prefill of TensorRT-LLM must answer one token")
    return tokens.ids[0], tokens.logprobs[0] if tokens.logprobs else None


def _reason_of_last_token(
    generation: InflightGeneration, prompt: Prompt, sampling: Sampling, facts: ModelFacts
) -> FinishReason | None:
    ids = generation.output.token_ids
    generated_before = generation.tokens - len(prompt.token_ids) + len(ids) - 1
    if not ids or generated_before < sampling.min_tokens:
        return None
    if ids[-1] in facts.eos_token_ids and not sampling.ignore_eos:
        return FinishReason.END_OF_SEQUENCE
    return FinishReason.STOP_TOKEN if ids[-1] in sampling.stop_token_ids else None


State = trtllm_state_pb2.TrtllmState

_FIELD = "handoff.engine_state"
_IDS = ("ctx_request_id", "disagg_request_id", "ctx_dp_rank", "schedule_style")
_SCALARS = (*_IDS, "opaque_state", "ctx_info_endpoint")
# The decode side does not need these: it sets the request type itself, images are in the KV already (their handles are
# refused there), and usage is in the handoff.
_LEFT_BEHIND = frozenset(
    {
        "request_type",
        "multimodal_embedding_handles",
        "multimodal_hashes",
        "multimodal_item_runs",
        "ctx_usage",
        "conversation_id",
    }
)
_CARRIED = frozenset({*_SCALARS, "first_gen_tokens", "draft_tokens", "first_gen_log_probs"})
_MAX_ID = 2**63
_MAX_STATE_BYTES = 1 << 20
_MAX_ENDPOINT_BYTES = 1 << 10


def write_state(params: Any) -> bytes:
    """Serializes what a prefill answered. Raises EngineFailed if the KV cannot be found by it or a field is unknown."""
    given = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    present = {name: value for name, value in given.items() if value is not None and name not in _LEFT_BEHIND}
    if unknown := sorted(set(present) - _CARRIED):
        raise EngineFailed(f"the handoff has {', '.join(unknown)}, which cannot be handed over")
    state = State(first_gen_tokens=present.get("first_gen_tokens", ()))
    for name in _SCALARS:
        if name in present:
            setattr(state, name, _number(present[name]) if name in _IDS else present[name])
    if "draft_tokens" in present:
        state.draft_tokens.CopyFrom(trtllm_state_pb2.TrtllmTokens(token_ids=present["draft_tokens"]))
    state.first_gen_log_probs.extend(_written(position) for position in present.get("first_gen_log_probs", ()))
    if problem := _problem(state):
        raise EngineFailed(f"the handoff cannot be fetched: {problem}")
    return state.SerializeToString()


def read_state(package: Package, content: bytes, first_tokens: Sequence[int]) -> Any:
    """Makes the DisaggregatedParams that fetch the KV of a request that continues `first_tokens`.

    Raises InvalidRequest for a state that cannot be right, and LayoutMismatch if this version lacks one of its fields.
    """
    state = _parsed(content)
    if problem := _problem(state):
        raise InvalidRequest.of(_FIELD, problem)
    if list(state.first_gen_tokens) != list(first_tokens):
        raise InvalidRequest.of(_FIELD, "its first tokens are not those that were sent to the client")
    fields = _fields(package, state)
    if unknown := sorted(set(fields) - package.handoff_fields):
        raise LayoutMismatch(f"TensorRT-LLM {package.version} does not know {', '.join(unknown)} of a handoff")
    return package.disaggregated_params(request_type="generation_only", **fields)


def _parsed(content: bytes) -> State:
    try:
        state = State.FromString(content)
    except DecodeError as error:
        raise InvalidRequest.of(_FIELD, "is not a state of TensorRT-LLM") from error
    if len(UnknownFieldSet(state)):
        raise LayoutMismatch("the handoff's state has fields of a later version")
    return state


def _fields(package: Package, state: State) -> dict[str, Any]:
    present = {field.name: value for field, value in state.ListFields()}
    fields: dict[str, Any] = {name: present[name] for name in _SCALARS if name in present}
    fields["first_gen_tokens"] = list(state.first_gen_tokens)
    if state.HasField("draft_tokens"):
        fields["draft_tokens"] = list(state.draft_tokens.token_ids)
    if state.first_gen_log_probs:
        fields["first_gen_log_probs"] = [_read(package, position) for position in state.first_gen_log_probs]
    return fields


def _problem(state: State) -> str:
    """Returns why KV cannot be fetched by this state; empty if it can."""
    if not state.first_gen_tokens:
        return "it has no first token"
    if not (state.HasField("ctx_request_id") or state.HasField("disagg_request_id")):
        return "it names no request"
    if not (state.opaque_state or (state.ctx_info_endpoint and state.HasField("disagg_request_id"))):
        return "it says neither by opaque_state nor by ctx_info_endpoint where the KV is"
    for name in _IDS:
        if not 0 <= getattr(state, name) < _MAX_ID:
            return f"{name} is negative"
    if len(state.opaque_state) > _MAX_STATE_BYTES or len(state.ctx_info_endpoint) > _MAX_ENDPOINT_BYTES:
        return "it is too long"
    if state.first_gen_log_probs and len(state.first_gen_log_probs) != len(state.first_gen_tokens):
        return "its first tokens and their log probabilities differ in number"
    return ""


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_ID:
        raise EngineFailed(f"the handoff has an invalid id, {value!r}")
    return int(value)


def _written(position: Any) -> trtllm_state_pb2.TrtllmLogprobs:
    """Versions have one of two shapes: the sampled token's number, or the reports of several tokens."""
    if isinstance(position, float):
        return trtllm_state_pb2.TrtllmLogprobs(sampled=position)
    if not isinstance(position, dict):
        raise Unsupported(f"log probabilities of the type {type(position).__name__} cannot be handed over")
    tokens = [
        trtllm_state_pb2.TrtllmLogprob(token_id=token_id, logprob=report.logprob, rank=report.rank)
        for token_id, report in position.items()
    ]
    return trtllm_state_pb2.TrtllmLogprobs(tokens=tokens)


def _read(package: Package, position: trtllm_state_pb2.TrtllmLogprobs) -> Any:
    if position.HasField("sampled"):
        return position.sampled
    return {
        token.token_id: package.logprob(logprob=token.logprob, rank=token.rank if token.HasField("rank") else None)
        for token in position.tokens
    }
