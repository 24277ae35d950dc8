"""A handoff's state between TensorRT-LLM's DisaggregatedParams and bytes: typed, and never with a field left behind.

Both ways fail closed: what has a value and no place on the other side is an error, for KV that is only nearly described
can stall every request of the engine that fetches it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from baton.engine.v1 import trtllm_state_pb2
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from rpc.errors import EngineFailed, InvalidRequest, LayoutMismatch, Unsupported
from services.engines.trtllm.package import Package

State = trtllm_state_pb2.TrtllmState

_FIELD = "handoff.engine_state"
_IDS = ("ctx_request_id", "disagg_request_id", "ctx_dp_rank", "schedule_style")
_SCALARS = (*_IDS, "opaque_state", "ctx_info_endpoint")
# Whose loss changes nothing: the decode side says itself what it wants, images are in the KV already (and their handles
# are refused there), and usage is in the handoff.
_LEFT_BEHIND = frozenset(
    {"request_type", "multimodal_embedding_handles", "multimodal_hashes", "multimodal_item_runs", "ctx_usage"}
)
_CARRIED = frozenset({*_SCALARS, "first_gen_tokens", "draft_tokens", "first_gen_log_probs"})
_MAX_ID = 2**63
_MAX_STATE_BYTES = 1 << 20
_MAX_ENDPOINT_BYTES = 1 << 10


def write(params: Any) -> bytes:
    """What a prefill answered. Raises EngineFailed if the KV cannot be found by it, or not all of it is understood."""
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


def read(package: Package, content: bytes, first_tokens: Sequence[int]) -> Any:
    """DisaggregatedParams to fetch by, for a request that continues `first_tokens`.

    Raises InvalidRequest if it cannot be right, LayoutMismatch if this version does not know all that it says, and
    Unsupported for multimodal handles, which are void here.
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
        raise InvalidRequest.of(_FIELD, "is no state of TensorRT-LLM") from error
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
    """Why nobody can fetch by this state; empty if somebody may."""
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
        raise EngineFailed(f"the handoff has the id {value!r}, which is none")
    return int(value)


def _written(position: Any) -> trtllm_state_pb2.TrtllmLogprobs:
    """Versions have one of two shapes: the sampled token's alone, or several tokens'."""
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
