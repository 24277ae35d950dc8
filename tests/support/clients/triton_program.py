"""A program that speaks to a router by NVIDIA's own client: `ADDRESS [embed | each CALLS]`. It prints JSON.

It is a process of its own because both bring protos of one package, which one process cannot load.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy
from tritonclient.grpc.aio import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException


def text(name: str, *values: str) -> InferInput:
    made = InferInput(name, [len(values)], "BYTES")
    made.set_data_from_numpy(numpy.array([value.encode() for value in values], dtype=numpy.object_))
    return made


def texts(result: Any, name: str) -> list[str]:
    found = result.as_numpy(name)
    return [] if found is None else [one.decode() for one in found]


async def status_of(call: Any) -> tuple[str, str]:
    try:
        await call
    except InferenceServerException as error:
        return error.status(), error.message()
    return "OK", ""


async def streamed(client: InferenceServerClient, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async def sent() -> AsyncIterator[dict[str, Any]]:
        for request in requests:
            yield request

    found: list[dict[str, Any]] = []
    async for result, error in client.stream_infer(sent()):
        if error is not None:
            found.append({"error": error.message()})
            continue
        response = result.get_response()
        found.append(
            {
                "id": response.id,
                "text": texts(result, "text_output"),
                "reason": texts(result, "finish_reason"),
                "index": response.parameters["index"].int64_param,
                "final": response.parameters["triton_final_response"].bool_param,
            }
        )
    return found


async def main(address: str) -> None:
    prompt, seeded = [text("text_input", "hello")], {"max_tokens": 12, "temperature": 1.0, "seed": 7}
    async with InferenceServerClient(address) as client:
        metadata = await client.get_model_metadata("demo", as_json=True)
        config = await client.get_model_config("demo", as_json=True)
        whole = await client.infer("demo", prompt, parameters=seeded, request_id="mine")
        several = await client.infer("demo", prompt, parameters={**seeded, "n": 3})
        wanted = [InferRequestedOutput("text_output")]
        sampling = text("sampling_parameters", json.dumps(seeded))
        by_json = await client.infer("demo", [*prompt, sampling], outputs=wanted)
        plain = {"model_name": "demo", "inputs": prompt, "parameters": seeded, "enable_empty_final_response": True}
        answers = {
            "ready": [
                await client.is_server_live(),
                await client.is_server_ready(),
                await client.is_model_ready("demo"),
            ],
            "unknown ready": await client.is_model_ready("other"),
            "inputs": [tensor["name"] for tensor in metadata["inputs"]],
            "decoupled": config["config"]["model_transaction_policy"]["decoupled"],
            "whole": [*texts(whole, "text_output"), *texts(whole, "finish_reason"), whole.get_response().id],
            "several": texts(several, "text_output"),
            "by_json": [texts(by_json, "text_output"), len(by_json.get_response().outputs)],
            "stream": await streamed(client, [{**plain, "request_id": "one"}]),
            "streams": await streamed(client, [{**plain, "request_id": f"r{index}"} for index in range(3)]),
            "wrong": await streamed(client, [{**plain, "inputs": []}, {**plain, "request_id": "after"}]),
            "statuses": [
                await status_of(client.infer("demo", prompt, parameters={"max_tokenz": 1})),
                await status_of(client.infer("demo", prompt, parameters={"temperature": -1.0})),
                await status_of(client.infer("demo", prompt, parameters={"temperature": "hot"})),
                await status_of(client.infer("other", prompt)),
                await status_of(client.infer("demo", [text("prompt", "hello")])),
            ],
        }
    print(json.dumps(answers))


async def embed(address: str) -> None:
    texts_of = text("text_input", "one", "another", "")
    both = [text("text_input", "one", "another")]
    vectors = [InferRequestedOutput("embedding")]
    async with InferenceServerClient(address) as client:
        metadata = await client.get_model_metadata("demo", as_json=True)
        config = await client.get_model_config("demo", as_json=True)
        whole = await client.infer("demo", both, outputs=vectors, request_id="mine")
        short = await client.infer("demo", both, outputs=vectors, parameters={"dimensions": 5, "normalize": False})

        async def sent() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "demo", "inputs": both, "outputs": vectors, "request_id": "streamed"}

        streamed = [(result, error) async for result, error in client.stream_infer(sent())]
        answers = {
            "ready": [await client.is_server_ready(), await client.is_model_ready("demo")],
            "inputs": [(one["name"], one["datatype"], one["shape"]) for one in metadata["inputs"]],
            "outputs": [(one["name"], one["datatype"], one["shape"]) for one in metadata["outputs"]],
            "config": config["config"]["output"],
            "whole": whole.as_numpy("embedding").tolist(),
            "id": whole.get_response().id,
            "prompt_tokens": whole.get_response().parameters["prompt_tokens"].int64_param,
            "short": short.as_numpy("embedding").tolist(),
            "streamed": [(str(error), result.as_numpy("embedding").tolist()) for result, error in streamed],
            "statuses": [
                await status_of(client.infer("demo", [texts_of], outputs=vectors)),
                await status_of(client.infer("demo", both, outputs=vectors, parameters={"dimensions": 65})),
                await status_of(client.infer("demo", both, outputs=vectors, parameters={"dimensions": True})),
                await status_of(client.infer("demo", both, outputs=vectors, parameters={"max_tokens": 3})),
                await status_of(client.infer("demo", both, outputs=[*vectors, InferRequestedOutput("text_output")])),
                await status_of(client.infer("demo", [*both, text("sampling_parameters", "{}")], outputs=vectors)),
            ],
        }
    print(json.dumps(answers))


async def each(address: str, calls: str) -> None:
    """Makes calls of `infer`, each from its parameters and options; prints the text or the status of each."""
    found = []
    async with InferenceServerClient(address) as client:
        for call in json.loads(calls):
            inputs = [text("text_input", "hello")]
            if "sampling" in call:
                inputs.append(text("sampling_parameters", json.dumps(call.pop("sampling"))))
            outputs = [InferRequestedOutput("text_output", class_count=call.pop("class_count", 0))]
            if "shared_memory" in call:
                outputs[0].set_shared_memory(call.pop("shared_memory"), 8)
            try:
                answer = await client.infer("demo", inputs, outputs=outputs, **call)
            except InferenceServerException as error:
                found.append([error.status().removeprefix("StatusCode."), error.message()])
            else:
                found.append(["OK", texts(answer, "text_output")[0]])
        versions = [await client.is_model_ready("demo", version) for version in ("", "1", "7")]
        metadata = await status_of(client.get_model_metadata("demo", "7"))
    print(json.dumps({"calls": found, "ready": versions, "metadata": metadata}))


match sys.argv[1:]:
    case [address, "each", calls]:
        asyncio.run(each(address, calls))
    case [address, "embed"]:
        asyncio.run(embed(address))
    case [address]:
        asyncio.run(main(address))
