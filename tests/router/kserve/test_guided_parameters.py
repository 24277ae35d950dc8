"""Guided decoding by KServe's protocol: its parameters reach the engine, and wrong ones are named."""

import json
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from support.cluster.in_process import PATIENT, Bench, bench
from support.engines.checkpoints import DEMO
from support.engines.guided import check_json
from support.engines.schemas import FLAG, closed
from support.lifetimes import in_one_task

from baton.kserve import inference_pb2 as pb
from router.kserve.service import NAME
from rpc.channels import open_channel
from services.config import WorkerConfig
from services.engines.pytorch.config import PyTorchConfig

in_shared_loop = pytest.mark.asyncio(loop_scope="module")
SCHEMA = closed(on=FLAG)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model() -> AsyncIterator[Bench]:
    config = WorkerConfig(
        worker_id="w1",
        roles=("prefill", "decode"),
        engine=PyTorchConfig(model=DEMO, name="demo", threads=1, kv_cache_bytes=16 << 20),
        drain_seconds=0,
    )
    async with in_one_task(bench(config, router=PATIENT, proxied=False)) as running:
        yield running


async def infer(running: Bench, **parameters: str) -> str:
    """The text of an answer by ModelInfer, greedy."""
    request = pb.ModelInferRequest(model_name="demo")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
    request.parameters["temperature"].double_param = 0.0
    request.parameters["max_tokens"].int64_param = 100
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    async with open_channel(running.address) as channel:
        call = channel.unary_unary(
            f"/{NAME}/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        answer: pb.ModelInferResponse = await call(request, timeout=60)
    [output] = [index for index, one in enumerate(answer.outputs) if one.name == "text_output"]
    return answer.raw_output_contents[output][4:].decode()


@pytest.mark.feature("guided decoding", engine="pytorch", facade="kserve")
@in_shared_loop
async def test_an_answer_follows_the_grammar_of_a_parameter(model: Bench) -> None:
    check_json(await infer(model, guided_json=json.dumps(SCHEMA)), SCHEMA)
    assert await infer(model, guided_regex="(abc){2}") == "abcabc"
    assert await infer(model, guided_grammar='start: "yes!"') == "yes!"


@in_shared_loop
async def test_a_wrong_grammar_is_named(model: Bench) -> None:
    wrong = [
        ({"guided_json": '{"not": {}}'}, "guided.json_schema.not"),
        ({"guided_regex": "("}, "guided.regex"),
        ({"guided_regex": "a", "guided_json": "{}"}, "an answer follows one grammar"),
    ]
    for parameters, named in wrong:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await infer(model, **parameters)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert named in str(refused.value.details())
