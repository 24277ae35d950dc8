"""The state of a handoff: vLLM's kv_transfer_params as a typed message, written and read with every value checked.

A wrong one ends the process of the engine that reads it: too few blocks, or ids of the wrong type. So both directions
fail closed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from baton.engine.v1 import vllm_state_pb2
from baton.errors import EngineFailed, InvalidRequest, LayoutMismatch

VllmState = vllm_state_pb2.VllmState

_FIELD = "handoff.engine_state"
_TEXTS = ("remote_engine_id", "remote_request_id", "remote_host")
_NUMBERS = ("remote_port", "remote_num_tokens", "tp_size", "dcp_size", "pp_size")
_SIZES = ("tp_size", "dcp_size", "pp_size")
_TYPED = frozenset({*_TEXTS, *_NUMBERS, "remote_block_ids", "do_remote_prefill", "do_remote_decode"})
_MAX_TEXT = 256
_MAX_MORE = 32
_MAX_RANKS = 4096
_MAX_BLOCKS = 1 << 20
# A connector that pushes would write into blocks that a reader has not offered.
_PULL = {"transfer_mode": "pull"}


@dataclass(frozen=True, slots=True)
class Remembered:
    """The state for a reader beside vLLM's parameters: the length of vLLM's prompt, and the seed that was chosen."""

    prompt_tokens: int
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ReadState:
    """A state that has been checked: vLLM's parameters for the reader, and what it needs beside them."""

    params: Mapping[str, Any]
    remembered: Remembered


def write_state(params: Mapping[str, Any], block_tokens: int, remembered: Remembered) -> bytes:
    """Serializes what a prefill answered. Raises EngineFailed if its KV could not be read by it."""
    try:
        state = VllmState(prompt_tokens=remembered.prompt_tokens, seed=remembered.seed)
        for name in _TEXTS:
            setattr(state, name, _text(params[name]))
        for name in _NUMBERS:
            setattr(state, name, _whole(params.get(name) or 1 if name in _SIZES else params[name]))
        blocks = -(-remembered.prompt_tokens // block_tokens)
        state.remote_block_ids.extend(_only_group(params["remote_block_ids"])[:blocks])
        for name in sorted(set(params) - _TYPED):
            state.more[name] = json.dumps(params[name])
    except (KeyError, TypeError, ValueError) as error:
        raise EngineFailed(f"the handoff of vLLM cannot be written: {type(error).__name__}: {error}") from error
    # vLLM may have computed further: the tokens that an answer generated again. A reader needs its prompt only.
    state.remote_num_tokens = min(state.remote_num_tokens, remembered.prompt_tokens)
    if problem := _problem(state, block_tokens):
        raise EngineFailed(f"the handoff of vLLM cannot be read: {problem}")
    return state.SerializeToString()


def read_state(content: bytes, block_tokens: int, context_tokens: int) -> ReadState:
    """Returns the parameters by which vLLM reads KV for a context of this many tokens.

    Raises InvalidRequest for a state that cannot be right, and LayoutMismatch for one of a later version.
    """
    try:
        state = VllmState.FromString(content)
    except DecodeError as error:
        raise InvalidRequest.of(_FIELD, "is not a state of vLLM") from error
    if len(UnknownFieldSet(state)):
        raise LayoutMismatch("the handoff's state has fields of a later version")
    problem = _problem(state, block_tokens)
    if not problem and state.prompt_tokens > context_tokens:
        problem = f"its prompt of {state.prompt_tokens} tokens is longer than the context, {context_tokens}"
    if problem:
        raise InvalidRequest.of(_FIELD, problem)
    params: dict[str, Any] = {name: getattr(state, name) for name in (*_TEXTS, *_NUMBERS)}
    params |= {name: json.loads(value) for name, value in state.more.items()}
    params |= {"remote_block_ids": [list(state.remote_block_ids)], "do_remote_prefill": True, "do_remote_decode": False}
    seed = state.seed if state.HasField("seed") else None
    return ReadState(params, Remembered(state.prompt_tokens, seed))


def _problem(state: VllmState, block_tokens: int) -> str:
    """Returns why KV cannot be read by this state; empty if it can."""
    for name in _TEXTS:
        if not 0 < len(getattr(state, name)) <= _MAX_TEXT:
            return f"{name} is empty or too long"
    if not 0 < state.remote_port < 1 << 16:
        return f"remote_port: {state.remote_port} is not a port"
    for name in _SIZES:
        if not 0 < getattr(state, name) <= _MAX_RANKS:
            return f"{name}: {getattr(state, name)} is not a valid number of ranks"
    return _problem_of_blocks(state, block_tokens) or _problem_of_more(state)


def _problem_of_blocks(state: VllmState, block_tokens: int) -> str:
    blocks, ids = -(-state.prompt_tokens // block_tokens), state.remote_block_ids
    if not state.prompt_tokens or state.remote_num_tokens != state.prompt_tokens:
        return (
            f"remote_num_tokens: {state.remote_num_tokens} tokens of KV do not match a prompt of {state.prompt_tokens}"
        )
    if len(ids) != blocks:
        return f"{state.prompt_tokens} tokens do not fill {len(ids)} blocks of {block_tokens}"
    # Block 0 is vLLM's empty one.
    if len(set(ids)) != len(ids) or not all(0 < each < _MAX_BLOCKS for each in ids):
        return "its block ids repeat or are out of range"
    return ""


def _problem_of_more(state: VllmState) -> str:
    if len(state.more) > _MAX_MORE:
        return "it has too many parameters"
    for name, text in state.more.items():
        if name in _TYPED or len(name) > _MAX_TEXT or len(text) > _MAX_TEXT:
            return "a further parameter is typed, or too long"
        try:
            value = json.loads(text)
        except ValueError:
            return f"{name} is not JSON"
        if not isinstance(value, str | int | float | bool | None):
            return f"{name}: not a plain value"
        if name in _PULL and value != _PULL[name]:
            return f"{name} is {value!r}, and only {_PULL[name]!r} is supported"
    return ""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not a number")
    return int(value)


def _only_group(groups: Sequence[Any]) -> list[int]:
    """The block ids of the only group of layers. Models with several kinds of attention have more, with gaps."""
    if len(groups) != 1:
        raise ValueError(f"{len(groups)} groups of blocks; only models of one kind of attention can be handed over")
    return [_whole(each) for each in groups[0]]
