"""Refused requests: the status and the field, before any worker is called."""

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status
from structlog.testing import capture_logs
from support.cluster.in_process import Bench, bench, simulated
from support.engines.checkpoints import DEMO
from support.log_fields import merge_log_fields

from baton.inference.v1 import generate_pb2, model_pb2, tokenize_pb2

INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED


async def refusal(running: Bench, **fields: Any) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        await running.generate(**fields)
    return caught.value


def wrong_fields(error: aio.AioRpcError) -> list[str]:
    """The paths in the status's BadRequest."""
    status = rpc_status.from_call(error)
    assert status is not None
    bad = error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(bad)
    return [violation.field for violation in bad.field_violations]


NAN = float("nan")
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": "x" * (512 * 16)}),
    ("prompt", {"prompt": "x" * 10_000_000}),
    ("token_ids.ids", {"token_ids": {}}),
    ("token_ids.ids[2]", {"token_ids": {"ids": [1, 2, 257]}}),
    ("token_ids.ids", {"token_ids": {"ids": [1] * 512 * 16}}),
    ("chat.messages", {"chat": {}}),
    ("chat.messages[0].role", {"chat": {"messages": [{"parts": [{"text": "x"}]}]}}),
    ("chat.messages[0].parts", {"chat": {"messages": [{"role": "user"}]}}),
    ("chat.messages[0].parts[0]", {"chat": {"messages": [{"role": "user", "parts": [{}]}]}}),
    ("request_id", {"prompt": "x", "request_id": "a\nb"}),
    ("sampling.temperature", {"prompt": "x", "sampling": {"temperature": -0.5}}),
    ("sampling.temperature", {"prompt": "x", "sampling": {"temperature": NAN}}),
    ("sampling.temperature", {"prompt": "x", "sampling": {"temperature": float("inf")}}),
    ("sampling.top_p", {"prompt": "x", "sampling": {"top_p": 0.0}}),
    ("sampling.top_p", {"prompt": "x", "sampling": {"top_p": 1.5}}),
    ("sampling.min_p", {"prompt": "x", "sampling": {"min_p": -0.1}}),
    ("sampling.repetition_penalty", {"prompt": "x", "sampling": {"repetition_penalty": 0.0}}),
    ("sampling.presence_penalty", {"prompt": "x", "sampling": {"presence_penalty": 3.0}}),
    ("sampling.frequency_penalty", {"prompt": "x", "sampling": {"frequency_penalty": -3.0}}),
    ("sampling.logit_bias[999]", {"prompt": "x", "sampling": {"logit_bias": {999: 1.0}}}),
    ("sampling.bad_words[1]", {"prompt": "x", "sampling": {"bad_words": ["a", ""]}}),
    ("sampling.bad_words[0]", {"prompt": "x", "sampling": {"bad_words": ["a" * 257]}}),
    ("sampling.bad_words", {"prompt": "x", "sampling": {"bad_words": ["a"] * 65}}),
    ("sampling.logit_bias[5]", {"prompt": "x", "sampling": {"logit_bias": {5: 101.0}}}),
    ("sampling.n", {"prompt": "x", "sampling": {"n": 0}}),
    ("stopping.max_tokens", {"prompt": "x", "stopping": {"max_tokens": 0}}),
    ("stopping.min_tokens", {"prompt": "x", "stopping": {"max_tokens": 2, "min_tokens": 3}}),
    ("stopping.stop[1]", {"prompt": "x", "stopping": {"stop": ["a", ""]}}),
    ("stopping.stop", {"prompt": "x", "stopping": {"stop": ["a"] * 17}}),
    ("stopping.stop[0]", {"prompt": "x", "stopping": {"stop": ["a" * 257]}}),
    ("stopping.stop_token_ids[0]", {"prompt": "x", "stopping": {"stop_token_ids": [257]}}),
    ("response.logprobs", {"prompt": "x", "response": {"logprobs": 21}}),
    ("response.min_tokens_per_message", {"prompt": "x", "response": {"min_tokens_per_message": 1025}}),
    ("response.max_delay", {"prompt": "x", "response": {"max_delay": {"seconds": 11}}}),
    ("response.max_delay", {"prompt": "x", "response": {"max_delay": {"seconds": -1}}}),
    ("routing.topology", {"prompt": "x", "routing": {"topology": 9}}),
]


async def test_each_wrong_field_is_named_and_no_worker_is_called(pair: Bench) -> None:
    with capture_logs(processors=[merge_log_fields]) as lines:
        for field, request in WRONG:
            error = await refusal(pair, **request)
            assert (error.code(), wrong_fields(error)) == (INVALID, [field]), field
    methods = {line.get("method", "") for line in lines}
    assert "/baton.inference.v1.InferenceService/Generate" in methods
    assert not [method for method in methods if "PrefillService" in method or "DecodeService" in method]
    assert await pair.text_of(prompt="x", stopping={"max_tokens": 3})


async def test_all_wrong_fields_are_named_together(pair: Bench) -> None:
    error = await refusal(pair, sampling={"temperature": -1.0, "top_p": 2.0}, stopping={"max_tokens": 0})
    assert wrong_fields(error) == ["prompt", "sampling.temperature", "sampling.top_p", "stopping.max_tokens"]


UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("guided decoding", {"guided": {"regex": "a+"}}),
    ("lora", {"lora_name": "mine"}),
    ("media", {"media": [{"mime_type": "image/png", "data": b"x"}]}),
]


@pytest.mark.parametrize(("what", "request_fields"), UNSUPPORTED, ids=[what for what, _ in UNSUPPORTED])
async def test_what_the_model_cannot_do_is_refused_with_what_it_can(
    pair: Bench, what: str, request_fields: dict[str, Any]
) -> None:
    error = await refusal(pair, prompt="x", **request_fields)
    assert error.code() == UNIMPLEMENTED
    assert (
        error.details() == f"demo does not support {what}; it supports prompt, token_ids, chat, stop strings, logprobs"
    )


async def test_an_image_in_a_conversation_is_refused_too(pair: Bench) -> None:
    chat = {"messages": [{"role": "user", "parts": [{"media": {"uri": "file:///x.png"}}]}]}
    assert (await refusal(pair, chat=chat)).code() == UNIMPLEMENTED


async def test_an_unknown_model_is_not_found_and_the_served_ones_are_listed(pair: Bench) -> None:
    error = await refusal(pair, prompt="x", model="gpt")
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert "demo" in str(error.details())
    with pytest.raises(aio.AioRpcError, match="demo"):
        await pair.stub.GetModel(model_pb2.GetModelRequest(name="gpt"))


async def test_of_two_models_one_must_be_named() -> None:
    other = simulated("d2", "decode")
    other = other.model_copy(update={"engine": other.engine.model_copy(update={"name": "other"})})
    async with bench(simulated("d1", "decode"), other) as running:
        error = await refusal(running, prompt="x")
        assert (error.code(), wrong_fields(error)) == (INVALID, ["model"])
        assert "demo, other" in str(error.details())
        assert (await running.generate(prompt="x", model="other", stopping={"max_tokens": 2})).placed == ("", "d2")


async def test_a_prompt_that_leaves_no_room_says_how_long_it_is(pair: Bench) -> None:
    error = await refusal(pair, prompt="x" * (512 * 16))
    assert "8192 tokens" in str(error.details())


async def test_a_running_requests_id_cannot_be_taken(pair: Bench) -> None:
    slow = simulated("d2", "decode", decode_step_seconds=0.05)
    async with bench(slow) as running:
        request = generate_pb2.GenerateRequest(prompt="x", request_id="mine", stopping={"max_tokens": 100})
        call = running.stub.Generate(request)
        await call.read()
        error = await refusal(running, prompt="x", request_id="mine")
        assert error.code() == grpc.StatusCode.ALREADY_EXISTS
        call.cancel()


async def test_tokenize_and_detokenize_name_wrong_fields_too(pair: Bench) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await pair.stub.Tokenize(tokenize_pb2.TokenizeRequest())
    assert wrong_fields(caught.value) == ["prompt"]
    with pytest.raises(aio.AioRpcError) as caught:
        await pair.stub.Detokenize(tokenize_pb2.DetokenizeRequest(token_ids=[1, 300]))
    assert wrong_fields(caught.value) == ["token_ids[1]"]


async def test_no_more_wrong_fields_are_collected_than_are_told(pair: Bench) -> None:
    assert 1 < len(wrong_fields(await refusal(pair, token_ids={"ids": [300] * 8000}))) <= 20


NOT_FINITE: dict[str, dict[str, Any]] = {
    "chat.template_variables.temperature": {"temperature": NAN},
    "chat.template_variables.b.c[1]": {"a": 1.0, "b": {"c": [0.5, float("-inf")]}},
}


async def test_template_variables_are_finite() -> None:
    async with bench(simulated("w1", "prefill", "decode", model=str(DEMO))) as running:
        for field, variables in NOT_FINITE.items():
            chat = generate_pb2.ChatInput(messages=[{"role": "user", "parts": [{"text": "x"}]}])
            chat.template_variables.update(variables)
            error = await refusal(running, chat=chat)
            assert (error.code(), wrong_fields(error)) == (INVALID, [field])
            with pytest.raises(aio.AioRpcError) as caught:
                await running.stub.Tokenize(tokenize_pb2.TokenizeRequest(chat=chat))
            assert (caught.value.code(), wrong_fields(caught.value)) == (INVALID, [field])
