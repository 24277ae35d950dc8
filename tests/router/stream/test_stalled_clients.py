"""Clients that ask and take nothing of the answer: each is ended in time, frees its worker, and delays no other."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest
from google.protobuf.message import Message
from h2.settings import SettingCodes
from support.clients.kserve_call import text_request
from support.clients.openai_api import openai_bench
from support.clients.scraping import since
from support.cluster.in_process import PATIENT, Bench, bench, simulated
from support.eventually import eventually
from support.http2.client import RawClient, raw_client
from support.lifetimes import in_one_task

from baton.inference.v1 import generate_pb2, image_pb2
from baton_http2.limits import Http2Limits
from router.config import ClientConnections, LimitsConfig, OpenAIConfig, RetryConfig

TOKENS = 20_000
CLIENTS = 20
ROUTER = PATIENT.model_copy(
    update={
        "openai": OpenAIConfig(listen="127.0.0.1:0"),
        "limits": LimitsConfig(max_waiting_tokens=8, slow_reader_seconds=0.3),
        "connections": ClientConnections(
            http2=Http2Limits(slow_reader_seconds=1.0), input={"stall_seconds": 0.3, "bytes_per_second": 0}
        ),
    }
)
GENERATE = "/baton.inference.v1.InferenceService/Generate"
STOPPING = {"max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture
async def running() -> AsyncIterator[Bench]:
    """A worker that decodes, one that draws, and one that embeds."""
    engines = {"decode_step_seconds": 0.001, "num_blocks": 16_384, "draw_step_seconds": 0.001, "embed_dimensions": 4096}
    roles = [("w1", "prefill", "decode"), ("f1", "diffuse"), ("e1", "embed")]
    workers = [simulated(*each, **engines) for each in roles]
    async with in_one_task(openai_bench(*workers, router=ROUTER)) as opened:
        yield opened


def _kserve() -> Message:
    request = text_request("hello")
    request.parameters["max_tokens"].int64_param = TOKENS
    request.parameters["ignore_eos"].bool_param = True
    return request


CALLS: dict[str, tuple[str, Message]] = {
    "Generate": (GENERATE, generate_pb2.GenerateRequest(prompt="hello", stopping=STOPPING)),
    "Generate, several answers": (
        GENERATE,
        generate_pb2.GenerateRequest(prompt="hello", stopping=STOPPING, sampling={"n": 3}),
    ),
    "Generate, kept": (
        GENERATE,
        generate_pb2.GenerateRequest(prompt="hello", stopping=STOPPING, response={"keep": {"nanos": 200_000_000}}),
    ),
    "KServe": ("/inference.GRPCInferenceService/ModelStreamInfer", _kserve()),
    "ImageService": (
        "/baton.inference.v1.ImageService/Generate",
        image_pb2.ImageServiceGenerateRequest(
            options={"prompt": "a circle", "steps": 500, "preview_steps": 1, "number": 2}
        ),
    ),
}


def is_idle(bench: Bench) -> bool:
    """True if no request runs, at the router and on its workers."""
    loads = [worker.engines.load() for worker in bench.workers.values()]
    return not len(bench.requests) and not any(load.blocks_used or load.running for load in loads)


async def ask(client: RawClient, method: str, request: Message) -> None:
    wire = request.SerializeToString()
    stream = client.begin(method)
    client.connection.send_data(stream, b"\0" + len(wire).to_bytes(4, "big") + wire, end_stream=True)


async def read_beside(bench: Bench) -> None:
    """Another client, which reads."""
    stopping = {"max_tokens": 100, "ignore_eos": True}
    assert len((await bench.generate(prompt="another", stopping=stopping)).token_ids) == 100


@pytest.mark.parametrize("name", CALLS)
async def test_streams_whose_windows_stay_closed_are_ended(running: Bench, name: str) -> None:
    ended = since("baton_http2_budget_exceeded_total", budget="slow_reader")
    async with raw_client(running.address) as client:
        client.connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        for _ in range(CLIENTS):
            await ask(client, *CALLS[name])
        await client.flush()
        answering = asyncio.create_task(client.answer())
        await eventually(lambda: len(running.requests) == CLIENTS)
        await read_beside(running)
        await eventually(lambda: is_idle(running))
        # Also what each of them was still to be told.
        await eventually(lambda: ended.grown == CLIENTS)
        answering.cancel()
    await read_beside(running)


def stalled_socket(address: str) -> socket.socket:
    """A connection whose client takes a few kilobytes, and no more."""
    host, _, port = address.rpartition(":")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect((host, int(port)))
    return made


BODIES = {
    "completions": {"prompt": "hello", "max_tokens": TOKENS, "logprobs": 20, "stream": True, "ignore_eos": True},
    "embeddings": {"input": ["hello"] * 300},  # 25 MB, and 4 of them fit into the sockets' buffers
}


@pytest.mark.parametrize("path", BODIES)
async def test_http_connections_that_are_not_read_are_ended(running: Bench, path: str) -> None:
    ended = since("baton_http2_budget_exceeded_total", budget="slow_reader")
    body = json.dumps({"model": "demo", **BODIES[path]}).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    clients = [stalled_socket(running.openai_address) for _ in range(3)]
    try:
        for each in clients:
            each.sendall(f"{head}\r\n\r\n".encode() + body)
        await read_beside(running)
        await eventually(lambda: ended.grown == len(clients))
        await eventually(lambda: is_idle(running))
    finally:
        for each in clients:
            each.close()


async def test_http_connections_end_sooner_when_all_unread_answers_use_too_much_memory() -> None:
    ended = since("baton_http2_budget_exceeded_total", budget="unread_output")
    connections = ClientConnections(unread_output_bytes=32 * 2**20)
    router = ROUTER.model_copy(update={"connections": connections})
    body = json.dumps({"model": "demo", **BODIES["embeddings"]}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    async with openai_bench(simulated("e1", "embed", embed_dimensions=4096), router=router) as running:
        clients = [stalled_socket(running.openai_address) for _ in range(3)]
        try:
            for each in clients:
                each.sendall(head + body)
            await eventually(lambda: ended.grown >= 2)
            await eventually(lambda: is_idle(running))
        finally:
            for each in clients:
                each.close()


async def test_an_answer_that_stands_still_for_its_client_stays_on_its_worker() -> None:
    faults = since("baton_router_worker_faults_total", stage="decode")
    config = PATIENT.model_copy(
        update={"limits": LimitsConfig(max_waiting_tokens=8), "retry": RetryConfig(silence_seconds=2.0)}
    )
    workers = [simulated(name, "decode", num_blocks=16_384) for name in ("w1", "w2")]
    async with bench(*workers, router=config) as running, raw_client(running.address) as client:
        client.connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        await ask(client, *CALLS["Generate"])
        await client.flush()
        answering = asyncio.create_task(client.answer())
        handles = running.cluster.workers
        await eventually(lambda: any(one.calls._calls for one in handles))
        [one] = [one for one in handles if one.calls._calls]
        begun = one.calls._looked_at
        await eventually(lambda: one.calls._looked_at > begun + 6.0)
        assert one.calls._calls
        assert faults.grown == 0
        answering.cancel()
