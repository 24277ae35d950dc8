"""NVIDIA's own client, `tritonclient`, unchanged, against the router's port."""

import asyncio
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from support.clients.kserve_call import infer, text_request
from support.cluster.in_process import DECODE, PATIENT, PREFILL, Bench, bench, simulated
from support.eventually import eventually

from baton.calls import unary
from baton.inference.v1 import embed_pb2

PROGRAM = Path(__file__).resolve().parents[2] / "support" / "clients" / "triton_program.py"


async def answers_of(*words: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    answers: dict[str, Any] = json.loads(output)
    return answers


@pytest.mark.timeout(120)
@pytest.mark.feature("text prompts", engine="simulated", facade="kserve")
@pytest.mark.feature("whole answers", engine="simulated", facade="kserve")
@pytest.mark.feature("streaming", engine="simulated", facade="kserve")
@pytest.mark.feature("seeds", engine="simulated", facade="kserve")
@pytest.mark.feature("several answers", engine="simulated", facade="kserve")
async def test_tritons_client_gets_what_grpc_answers() -> None:
    async with bench(PREFILL, DECODE, router=PATIENT) as running:
        answers = await answers_of(running.address)
        texts = [await text_of(running, seed) for seed in (7, 8, 9)]
    assert answers["ready"] == [True, True, True]
    assert answers["unknown ready"] is False
    assert (answers["inputs"], answers["decoupled"]) == (["text_input", "stream", "sampling_parameters"], True)
    assert answers["whole"] == [texts[0], "length", "mine"]
    assert answers["several"] == texts
    assert answers["by_json"] == [[texts[0]], 1]
    check_stream(answers["stream"], "one", texts[0])
    for name in ("r0", "r1", "r2"):
        check_stream([one for one in answers["streams"] if one["id"] == name], name, texts[0])
    error, *others = answers["wrong"] if "error" in answers["wrong"][0] else reversed(answers["wrong"])
    assert error["error"] == "[INVALID_REQUEST] inputs.text_input: is missing"
    assert {one["id"] for one in others} == {"after"}
    statuses = [status for status, _ in answers["statuses"]]
    assert statuses == [*["StatusCode.INVALID_ARGUMENT"] * 3, "StatusCode.NOT_FOUND", "StatusCode.INVALID_ARGUMENT"]
    messages = [message for _, message in answers["statuses"]]
    fields = ["parameters.max_tokenz", "sampling.temperature", "parameters.temperature", "other", "inputs.text_input"]
    assert [field for field, message in zip(fields, messages, strict=True) if field not in message] == []


@pytest.mark.timeout(120)
@pytest.mark.feature("embeddings of texts", engine="simulated", facade="kserve")
async def test_tritons_client_gets_the_vectors_of_grpc() -> None:
    async with bench(simulated("e1", "embed", max_context_tokens=64), router=PATIENT) as running:
        answers = await answers_of(running.address, "embed")
        whole = await vectors_of(running)
        short = await vectors_of(running, dimensions=5, normalize=False)
    assert answers["ready"] == [True, True]
    assert answers["inputs"][0] == ["text_input", "BYTES", ["-1"]]
    assert answers["outputs"][-1] == ["embedding", "FP32", ["-1", "64"]]
    assert answers["config"][-1] == {"name": "embedding", "data_type": "TYPE_FP32", "dims": ["-1", "64"]}
    assert (answers["whole"], answers["id"], answers["prompt_tokens"]) == (whole, "mine", 10)
    assert answers["short"] == short
    assert answers["streamed"] == [["None", whole]]
    assert {status for status, _ in answers["statuses"]} == {"StatusCode.INVALID_ARGUMENT"}
    messages = [message for _, message in answers["statuses"]]
    fields = ["inputs[2]", "dimensions", "parameters.dimensions", "parameters.max_tokens", "outputs.text_output"]
    fields.append("inputs.sampling_parameters")
    assert [field for field, message in zip(fields, messages, strict=True) if field not in message] == []


@pytest.mark.timeout(120)
async def test_the_output_that_is_named_decides_for_a_model_with_both() -> None:
    async with bench(PREFILL, DECODE, simulated("e1", "embed"), router=PATIENT, proxied=False) as running:
        request = text_request("one")
        request.outputs.add(name="embedding")
        vectors = await infer(running.address, request)
        del request.outputs[:]
        request.parameters["max_tokens"].int64_param = 3
        text = await infer(running.address, request)
        [one, _] = await vectors_of(running)
    assert list(struct.unpack("<64f", vectors.raw_output_contents[0])) == one
    assert [output.name for output in text.outputs] == ["text_output", "finish_reason"]


@pytest.mark.feature("cancellation", engine="simulated", facade="kserve")
@pytest.mark.feature("stop strings", engine="simulated", facade="kserve")
async def test_a_stop_string_ends_an_answer_and_a_client_that_leaves_its_request() -> None:
    async with bench(PREFILL, DECODE, router=PATIENT, proxied=False) as running:
        whole = await text_of(running, 7)
        request = text_request("hello")
        request.parameters["temperature"].double_param = 1.0
        request.parameters["seed"].int64_param = 7
        request.parameters["max_tokens"].int64_param = 12
        request.parameters["stop"].string_param = whole[6:9]
        answer = await infer(running.address, request)
        assert answer.raw_output_contents[0][4:].decode() == whole[: whole.index(whole[6:9])]
        assert answer.raw_output_contents[1][4:] == b"stop"
        del request.parameters["stop"]
        request.parameters["max_tokens"].int64_param = 3000
        leaving = asyncio.create_task(infer(running.address, request))
        await eventually(lambda: running.used_blocks() > 0)
        leaving.cancel()
        await eventually(lambda: running.used_blocks() == 0)
    assert leaving.cancelled()


ACCEPTED: list[dict[str, Any]] = [
    *({"parameters": {name: value}} for name, value in {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": 0.5, "logit_bias": '{"65": 1.5}', "bad_words": '["xq", "yq"]', "seed": 3,
        "random_seed": 3, "n": 2, "min_tokens": 1, "stop": "xq", "stop_words": '["xq"]', "stop_token_ids": "[200]",
        "ignore_eos": True, "include_stop": True, "include_stop_str_in_output": True, "session_key": "s",
        "cache_salt": "s",
    }.items()),
    {"model_version": "1"},
    {"sampling": {"stop": ["xq"], "bad_words": "yq", "logit_bias": {"65": 1}, "stop_token_ids": [200]}},
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_version": "7"}, "model_version"),
    ({"model_version": "latest"}, "model_version"),
    ({"class_count": 3}, "outputs.text_output.parameters.classification"),
    ({"shared_memory": "region"}, "outputs.text_output.parameters.shared_memory"),
    ({"priority": 2}, "parameters.priority"),
    ({"timeout": 5}, "parameters.timeout"),
    ({"sequence_id": 5, "sequence_start": True}, "parameters.sequence_"),
    ({"parameters": {"stop": '["a", 1]'}}, "parameters.stop"),
    ({"parameters": {"stop": 5}}, "parameters.stop"),
    ({"parameters": {"bad_words": "[1]"}}, "parameters.bad_words"),
    ({"parameters": {"stop_token_ids": 5}}, "parameters.stop_token_ids"),
    ({"parameters": {"stop_token_ids": "[true]"}}, "parameters.stop_token_ids"),
    ({"parameters": {"stop_token_ids": "x"}}, "parameters.stop_token_ids"),
    ({"parameters": {"logit_bias": "[[1, 2]]"}}, "parameters.logit_bias"),
    ({"parameters": {"logit_bias": '{"1": true}'}}, "parameters.logit_bias"),
    ({"parameters": {"logit_bias": '{"1_0": 1}'}}, "parameters.logit_bias"),
    ({"parameters": {"logit_bias": '{"1": 1, "1": 2}'}}, "parameters.logit_bias: 1 is given more than once"),
    ({"parameters": {"seed": 1, "random_seed": 2}}, "sampling.seed is given twice"),
    ({"parameters": {"stop": "a"}, "sampling": {"stop": "b"}}, "stopping.stop is given twice"),
]


@pytest.mark.timeout(120)
async def test_each_parameter_of_the_page_is_followed_or_refused_by_its_name() -> None:
    async with bench(PREFILL, DECODE, router=PATIENT) as running:
        short = [{**call, "parameters": {"max_tokens": 3, **call.get("parameters", {})}} for call in ACCEPTED]
        calls = json.dumps([*short, *(call for call, _ in REFUSED)])
        answers = await answers_of(running.address, "each", calls)
    accepted, refused = answers["calls"][: len(ACCEPTED)], answers["calls"][len(ACCEPTED) :]
    assert [(call, answer) for call, answer in zip(ACCEPTED, accepted, strict=True) if answer[0] != "OK"] == []
    for (call, named), (status, message) in zip(REFUSED, refused, strict=True):
        assert (call, status) == (call, "INVALID_ARGUMENT")
        assert named in message, call
    assert answers["ready"] == [True, True, False]
    assert "model_version" in answers["metadata"][1]


@pytest.mark.timeout(120)
async def test_stop_and_bad_words_as_json_are_the_lists_that_grpc_has() -> None:
    seeded: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
    async with bench(PREFILL, DECODE, router=PATIENT) as running:
        whole = await text_of(running, 7)
        words = [whole[6:9], "never"]
        stopped = await running.text_of(
            prompt="hello", sampling={"temperature": 1.0, "seed": 7}, stopping={"max_tokens": 12, "stop": words}
        )
        spoken = {"temperature": 1.0, "seed": 7, "bad_words": words}
        held = await running.text_of(prompt="hello", sampling=spoken, stopping={"max_tokens": 12})
        calls = [
            {"parameters": {**seeded, "stop": json.dumps(words)}},
            {"sampling": {**seeded, "stop": json.dumps(words)}},
            {"sampling": {**seeded, "stop": words}},
            {"parameters": {**seeded, "stop": words[0]}},
            {"parameters": {**seeded, "bad_words": json.dumps(words)}},
        ]
        answers = await answers_of(running.address, "each", json.dumps(calls))
    assert stopped != whole
    assert answers["calls"] == [*[["OK", stopped]] * 4, ["OK", held]]


async def vectors_of(running: Bench, **fields: Any) -> list[list[float]]:
    request = embed_pb2.EmbedRequest(inputs=[{"text": "one"}, {"text": "another"}], **fields)
    response = await unary(running.stub.Embed(request, timeout=20))
    return [list(one.values) for one in response.embeddings]


def check_stream(messages: list[dict[str, Any]], name: str, text: str) -> None:
    assert {one["id"] for one in messages} == {name}
    assert "".join("".join(one["text"]) for one in messages) == text
    assert [one["final"] for one in messages] == [False] * (len(messages) - 1) + [True]
    assert messages[-1]["reason"] == ["length"]


async def text_of(running: Bench, seed: int) -> str:
    sampling = {"temperature": 1.0, "seed": seed}
    return await running.text_of(prompt="hello", sampling=sampling, stopping={"max_tokens": 12})
