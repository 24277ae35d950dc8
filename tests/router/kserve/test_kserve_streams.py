"""ModelStreamInfer without Triton's client: several requests on one stream, some of them wrong."""

from collections.abc import AsyncIterator, Sequence

import pytest
from support.clients.kserve_call import text_request
from support.cluster.in_process import PATIENT, Bench, bench, simulated
from support.lifetimes import in_one_task

from baton.kserve import inference_pb2 as pb
from router.kserve.service import NAME
from rpc.channels import open_channel


@pytest.fixture
async def running() -> AsyncIterator[Bench]:
    async with in_one_task(bench(simulated("w1", "prefill", "decode"), router=PATIENT)) as opened:
        yield opened


def named(name: str, **texts: str) -> pb.ModelInferRequest:
    made = text_request("hello")
    made.id = name
    made.parameters["max_tokens"].int64_param = 3
    for key, value in texts.items():
        made.parameters[key].string_param = value
    return made


async def streamed(running: Bench, requests: Sequence[pb.ModelInferRequest]) -> list[pb.ModelStreamInferResponse]:
    """All messages of a stream with these requests."""
    async with open_channel(running.address) as channel:
        call = channel.stream_stream(
            f"/{NAME}/ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        return [message async for message in call(iter(requests), timeout=60)]


async def test_the_last_message_of_each_request_says_so_also_if_it_is_an_error(running: Bench) -> None:
    messages = await streamed(running, [named("a"), named("wrong", nonsense="x"), named("b")])
    for name in ("a", "wrong", "b"):
        own = [one.infer_response for one in messages if one.infer_response.id == name]
        assert [one.parameters["triton_final_response"].bool_param for one in own] == [False] * (len(own) - 1) + [True]
    [error] = [one.error_message for one in messages if one.error_message]
    assert error.startswith("[INVALID_REQUEST] parameters.nonsense: unknown parameter")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("stop_token_ids", "[-1]", "must be a JSON list of token ids"),
        ("stop_token_ids", f"[{2**32}]", "must be a JSON list of token ids"),
        ("logit_bias", f'{{"{2**32}": 1}}', "must be a JSON object of biases by token id"),
    ],
)
async def test_an_id_that_cannot_be_one_is_refused_in_words_of_the_request(
    running: Bench, name: str, value: str, words: str
) -> None:
    [message] = await streamed(running, [named("a", **{name: value})])
    assert message.error_message == f"[INVALID_REQUEST] parameters.{name}: {words}"
