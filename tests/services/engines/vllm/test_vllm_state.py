"""The state of a handoff of vLLM: what is written is read, and everything that would end an engine is refused."""

import json
from typing import Any

import pytest

from baton.engine.v1.vllm_state_pb2 import VllmState
from baton.errors import EngineFailed, InvalidRequest, LayoutMismatch
from services.engines.vllm.handoff import Remembered, read_state, write_state

BLOCK = 32
PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": ([5, 9],),
    "remote_engine_id": "engine-1",
    "remote_request_id": "baton-1-abcdef12",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 50,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_registration_generation": 3,
}


def _written(tokens: int = 50, **changed: Any) -> bytes:
    return write_state({**PARAMS, **changed}, BLOCK, Remembered(tokens, 7))


def _changed(**fields: Any) -> bytes:
    state = VllmState.FromString(_written())
    for name, value in fields.items():
        if name == "remote_block_ids":
            del state.remote_block_ids[:]
            state.remote_block_ids.extend(value)
        else:
            setattr(state, name, value)
    return state.SerializeToString()


def test_a_reader_gets_the_parameters_that_vllm_gave() -> None:
    found = read_state(_written(), BLOCK, 50)
    assert found.params == {**PARAMS, "remote_block_ids": [[5, 9]]}
    assert found.remembered == Remembered(50, 7)


def test_blocks_behind_the_prompt_are_left_out() -> None:
    found = read_state(_written(remote_block_ids=([5, 9, 11],), remote_num_tokens=70), BLOCK, 70)
    assert found.params["remote_block_ids"] == [[5, 9]]
    assert found.params["remote_num_tokens"] == 50


@pytest.mark.parametrize(
    "changed",
    [
        {"remote_block_ids": [5]},
        {"remote_block_ids": [5, 9, 11]},
        {"remote_block_ids": [5, 5]},
        {"remote_block_ids": [0, 5]},
        {"remote_block_ids": [5, 1 << 31]},
        {"remote_num_tokens": 49},
        {"remote_num_tokens": 0, "prompt_tokens": 0, "remote_block_ids": []},
        {"prompt_tokens": 51, "remote_num_tokens": 51},
        {"remote_port": 0},
        {"remote_port": 70000},
        {"remote_host": ""},
        {"remote_engine_id": "x" * 300},
        {"tp_size": 0},
        {"pp_size": 1 << 20},
    ],
    ids=str,
)
def test_a_state_that_cannot_be_right_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_state(_changed(**changed), BLOCK, 50)
    assert refused.value.violations[0].field == "handoff.engine_state"


@pytest.mark.parametrize(
    ("name", "value"),
    [("transfer_mode", "push"), ("later", {"a": 1}), ("later", [1]), ("remote_host", "evil"), ("later", "x" * 300)],
)
def test_a_further_parameter_that_is_no_plain_value_is_refused(name: str, value: object) -> None:
    state = VllmState.FromString(_written())
    state.more[name] = json.dumps(value)
    with pytest.raises(InvalidRequest):
        read_state(state.SerializeToString(), BLOCK, 50)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xff\xff", b"\x00\x01\x02"])
def test_bytes_that_are_no_state_are_refused(content: bytes) -> None:
    with pytest.raises((InvalidRequest, LayoutMismatch)):
        read_state(content, BLOCK, 50)


@pytest.mark.parametrize(
    "changed",
    [
        {"remote_block_ids": ([5], [9])},
        {"remote_block_ids": ([5, "9"],)},
        {"remote_port": "5600"},
        {"remote_port": True},
        {"remote_engine_id": None},
        {"transfer_mode": "push"},
        {"remote_num_tokens": 30},
    ],
    ids=str,
)
def test_an_answer_of_vllm_that_could_not_be_read_is_not_handed_out(changed: dict[str, Any]) -> None:
    with pytest.raises(EngineFailed):
        _written(**changed)
