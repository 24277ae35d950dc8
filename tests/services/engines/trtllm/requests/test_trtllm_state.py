"""The conversion of a handoff's state between TensorRT-LLM's own type and bytes."""

from collections.abc import Iterator

import pytest
from fake_tensorrt_llm.values import Logprob
from support.engines import trtllm

from baton.engine.v1 import trtllm_state_pb2
from baton.errors import EngineFailed, InvalidRequest, LayoutMismatch
from services.engines.trtllm.package import Package, open_package
from services.engines.trtllm.requests import results

OPAQUE = b"\x00\xff not text"
LARGE = 2**60 + 1


@pytest.fixture(params=trtllm.VERSIONS)
def package(request: pytest.FixtureRequest) -> Iterator[Package]:
    with trtllm.trtllm(request.param):
        yield open_package()


@pytest.fixture
def newest() -> Iterator[Package]:
    with trtllm.trtllm("1.3.0rc30"):
        yield open_package()


def written(package: Package, **fields: object) -> bytes:
    base = {"request_type": "context_only", "first_gen_tokens": [5], "ctx_request_id": LARGE, "opaque_state": OPAQUE}
    return results.write_state(package.disaggregated_params(**{**base, **fields}))


def message(**fields: object) -> bytes:
    base = {"first_gen_tokens": [5], "ctx_request_id": LARGE, "opaque_state": OPAQUE}
    return trtllm_state_pb2.TrtllmState(**{**base, **fields}).SerializeToString()  # type: ignore[arg-type]


def test_large_ids_and_bytes_arrive_as_they_were(package: Package) -> None:
    params = results.read_state(package, written(package), (5,))
    assert (params.ctx_request_id, params.opaque_state, params.first_gen_tokens) == (LARGE, OPAQUE, [5])


def test_the_request_type_is_ours(package: Package) -> None:
    assert results.read_state(package, written(package), (5,)).request_type == "generation_only"


def test_what_was_null_stays_null_and_what_was_empty_stays_empty(package: Package) -> None:
    assert results.read_state(package, written(package), (5,)).draft_tokens is None
    assert results.read_state(package, written(package, draft_tokens=[]), (5,)).draft_tokens == []


def test_draft_tokens_are_carried(package: Package) -> None:
    assert results.read_state(package, written(package, draft_tokens=[8, 9]), (5,)).draft_tokens == [8, 9]


@pytest.mark.parametrize("logprobs", [[{5: Logprob(-0.25, 1), 6: Logprob(-2.0, None)}], [-0.25]])
def test_log_probabilities_of_either_shape_are_rebuilt(newest: Package, logprobs: list[object]) -> None:
    assert (
        results.read_state(newest, written(newest, first_gen_log_probs=logprobs), (5,)).first_gen_log_probs == logprobs
    )


def test_multimodal_handles_do_not_reach_decode(package: Package) -> None:
    params = results.read_state(package, written(package, multimodal_embedding_handles=[{"handle": 1}]), (5,))
    assert params.multimodal_embedding_handles is None


@pytest.mark.parametrize("name", ["mrope_position_ids_handle", "first_gen_logits"])
def test_what_cannot_be_carried_is_refused_at_prefill(newest: Package, name: str) -> None:
    with pytest.raises(EngineFailed, match=name):
        written(newest, **{name: [1]})


def test_a_field_that_this_version_does_not_know_is_refused_at_decode() -> None:
    with trtllm.trtllm("1.2.0"), pytest.raises(LayoutMismatch, match="disagg_request_id"):
        results.read_state(open_package(), message(disagg_request_id=LARGE), (5,))


def test_a_field_of_a_later_baton_is_refused_at_decode(newest: Package) -> None:
    with pytest.raises(LayoutMismatch, match="later version"):
        results.read_state(newest, message() + b"\xf8\x06\x01", (5,))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"opaque_state": None}, "where the KV is"),
        ({"opaque_state": None, "ctx_info_endpoint": "tcp://here:1"}, "where the KV is"),
        ({"ctx_request_id": None}, "names no request"),
        ({"ctx_request_id": -1}, "negative"),
        ({"first_gen_tokens": []}, "no first token"),
        ({"opaque_state": b"x" * (2**20 + 1)}, "too long"),
        ({"first_gen_tokens": [6]}, "differ from those sent"),
    ],
)
def test_a_state_that_cannot_be_right_is_refused(newest: Package, fields: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        results.read_state(newest, message(**fields), (5,))


@pytest.mark.parametrize("number", [True, 2**63, -1, 1.5, "7"])
def test_an_id_that_is_none_is_refused_at_prefill(newest: Package, number: object) -> None:
    with pytest.raises(EngineFailed, match="id"):
        written(newest, ctx_request_id=number)


def test_what_is_no_message_is_refused(newest: Package) -> None:
    with pytest.raises(InvalidRequest, match="not a state of TensorRT-LLM"):
        results.read_state(newest, b"\xff\xff", (5,))
