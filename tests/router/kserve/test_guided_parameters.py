"""Guided decoding by KServe's protocol: its parameters reach the engine, and wrong ones are named."""

import json
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from support.clients.kserve_call import infer, text_request
from support.cluster.in_process import PATIENT, Bench, bench
from support.engines.checkpoints import DEMO
from support.engines.guided import check_json
from support.engines.schemas import FLAG, closed
from support.lifetimes import in_one_task

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


async def text_of(running: Bench, *, sampling: object = None, **parameters: str) -> str:
    """The text of an answer by ModelInfer, greedy."""
    request = text_request("hello")
    request.parameters["temperature"].double_param = 0.0
    request.parameters["max_tokens"].int64_param = 100
    if sampling is not None:
        packed = request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1]).contents
        packed.bytes_contents.append((sampling if isinstance(sampling, str) else json.dumps(sampling)).encode())
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    answer = await infer(running.address, request)
    [output] = [index for index, one in enumerate(answer.outputs) if one.name == "text_output"]
    return answer.raw_output_contents[output][4:].decode()


@pytest.mark.feature("guided decoding", engine="pytorch", facade="kserve")
@in_shared_loop
async def test_an_answer_follows_the_grammar_of_a_parameter(model: Bench) -> None:
    check_json(await text_of(model, guided_json=json.dumps(SCHEMA)), SCHEMA)
    assert await text_of(model, guided_regex="(abc){2}") == "abcabc"
    assert await text_of(model, guided_grammar='start: "yes!"') == "yes!"
    assert await text_of(model, guided_choice='["perhaps"]') == "perhaps"
    tags = {"tags": [{"begin": "<on=", "jsonSchema": '{"const": 1}', "end": "/>"}], "is_required": True}
    assert await text_of(model, guided_structural_tags=json.dumps(tags)) == "<on=1/>"
    assert (
        await text_of(model, sampling={"guided_choice": ["no"], "stop_token_ids": [1], "logit_bias": {"7": 1}}) == "no"
    )
    check_json(await text_of(model, sampling={"guided_json": SCHEMA}), SCHEMA)


@pytest.mark.feature("bad words", engine="pytorch", facade="kserve")
@in_shared_loop
async def test_bad_words_are_those_of_grpc(model: Bench) -> None:
    free = await text_of(model)
    bad = free.split()[0]
    held = await model.text_of(
        prompt="hello", sampling={"temperature": 0, "bad_words": [bad]}, stopping={"max_tokens": 100}
    )
    assert held != free
    assert await text_of(model, bad_words=bad) == held
    assert await text_of(model, sampling={"bad_words": [bad]}) == held


@in_shared_loop
async def test_a_wrong_grammar_is_named(model: Bench) -> None:
    wrong = [
        ({"guided_json": '{"not": {}}'}, "guided.json_schema.not"),
        ({"guided_regex": "("}, "guided.regex"),
        ({"guided_regex": "a", "guided_json": "{}"}, "an answer follows one grammar"),
        ({"guided_choice": "yes"}, "parameters.guided_choice"),
        ({"guided_choice": "3"}, "parameters.guided_choice"),
        ({"guided_choice": '[""]'}, "guided.choice.texts[0]"),
        ({"guided_structural_tags": '{"tagz": 1}'}, "parameters.guided_structural_tags"),
        ({"guided_structural_tags": "[1]"}, "parameters.guided_structural_tags"),
        ({"guided_structural_tags": "{}"}, "guided.structural_tags.tags"),
        ({"logit_bias": '{"x": 1}'}, "parameters.logit_bias"),
        ({"logit_bias": "3"}, "parameters.logit_bias"),
        ({"stop_token_ids": '["a"]'}, "parameters.stop_token_ids"),
        ({"stop_token_ids": "5"}, "parameters.stop_token_ids"),
        ({"bad_words": ""}, "sampling.bad_words[0]"),
        ({"sampling": {"guided_regex": 1}}, "sampling_parameters.guided_regex: cannot be 1"),
        ({"sampling": {"seed": -1}}, "sampling_parameters.seed: cannot be -1"),
        ({"sampling": {"n": [1]}}, "sampling_parameters.n: cannot be [1]"),
        ({"top_p": "high"}, 'parameters.top_p: cannot be "high"'),
        ({"sampling": {"top_p": True}}, "sampling_parameters.top_p: cannot be true"),
    ]
    for parameters, named in wrong:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await text_of(model, **parameters)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert named in str(refused.value.details())


@in_shared_loop
@pytest.mark.parametrize(
    "text",
    ['{"temperature": 0, "temperature": 1}', '{"guided_json": {"const": 1, "const": 2}}'],
    ids=["option", "schema"],
)
async def test_no_key_of_the_sampling_parameters_may_be_given_twice(model: Bench, text: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="given more than once") as refused:
        await text_of(model, sampling=text)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "inputs.sampling_parameters" in str(refused.value.details())


@in_shared_loop
async def test_an_input_has_its_elements_at_one_place(model: Bench) -> None:
    request = text_request("x")
    request.raw_input_contents.append(b"\x01\0\0\0y")
    with pytest.raises(grpc.aio.AioRpcError, match=r"inputs\.text_input\.contents: is set beside raw") as refused:
        await infer(model.address, request)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
