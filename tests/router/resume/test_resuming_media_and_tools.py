"""Answers about images, with calls, reasoning and adapters go on, too; and those of readers that are slow."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.clients.resuming import Received
from support.clients.scraping import sample
from support.cluster.demo import demo_worker
from support.cluster.in_process import PATIENT, Bench, bench
from support.engines.adapters import save_adapter
from support.engines.checkpoints import DEMO
from support.engines.written_engine import HERMES_TEMPLATE, REASONING_TEMPLATE, writes, written_engines
from support.eventually import PATIENCE_SECONDS, eventually
from support.images.simulated_workers import about, leasing, multimodal

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from router.server import host_router
from rpc.channels import open_channel
from services.config import WorkerConfig

Stub = inference_service_pb2_grpc.InferenceServiceStub


@asynccontextmanager
async def routers(*workers: WorkerConfig) -> AsyncIterator[tuple[Bench, Stub]]:
    async with (
        bench(*workers, router=PATIENT, proxied=False) as running,
        host_router(PATIENT, running.registry) as other,
    ):
        await eventually(lambda: sum(not worker.problem for worker in other.cluster.workers) == len(workers))
        async with open_channel(other.address) as channel:
            yield running, Stub(channel)


async def read(call: Any, received: Received, until: int = 10**9) -> Received:
    async for message in call:
        received.add(message)
        if received.tokens >= until:
            call.cancel()
            break
    return received


def kept(**fields: Any) -> generate_pb2.GenerateRequest:
    request = generate_pb2.GenerateRequest(**fields)
    request.response.keep.seconds = 5
    return request


async def require_exact(running: Bench, other: Stub, request: generate_pb2.GenerateRequest, *, is_lost: bool) -> None:
    """Cuts the answer at several places, the last of which is before its end alone."""
    expected = await read(running.stub.Generate(request, timeout=PATIENCE_SECONDS), Received(request))
    for cut in sorted({1, expected.tokens // 2, expected.tokens - 1, expected.tokens}):
        received = await read(running.stub.Generate(request), Received(request), until=cut)
        # The first router has left it: a decode that it begins after that would be taken over, and not be lost.
        await eventually(lambda: sample("baton_router_running_requests") == 0)
        await eventually(lambda: not any(worker.kept.usage.attached for worker in running.workers.values()))
        if is_lost:
            for worker in running.workers.values():
                worker.kept.forget_all()
        again = other.ResumeGeneration(received.resume(), timeout=10.0)
        await read(again, received)
        assert received.whole == expected.whole, cut


@pytest.mark.parametrize("is_lost", [False, True], ids=["kept", "lost"])
@pytest.mark.parametrize("embeddings", ["inline", "leased"])
async def test_an_answer_about_an_image_goes_on(embeddings: str, is_lost: bool) -> None:
    worker = multimodal if embeddings == "inline" else leasing
    step = {"decode_step_seconds": 0.005}
    workers = [worker("e1", "encode"), worker("p1", "prefill", **step), worker("d1", "decode", **step)]
    async with routers(*workers) as (running, other):
        await require_exact(running, other, kept(**about(max_tokens=40)), is_lost=is_lost)


@pytest.mark.parametrize("is_lost", [False, True], ids=["kept", "lost"])
@pytest.mark.parametrize(
    ("answer", "template"),
    [
        ('Yes.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>', HERMES_TEMPLATE),
        ("hm é漢</think>\nYes 漢字.", REASONING_TEMPLATE),
    ],
    ids=["calls", "reasoning"],
)
async def test_calls_and_reasoning_go_on(answer: str, template: str, is_lost: bool) -> None:
    user = {"role": "user", "parts": [{"text": "hello"}]}
    chat = {"messages": [user], "tools": [{"name": "weather", "parameters": "{}"}]}
    with written_engines():
        async with routers(writes(answer, template)) as (running, other):
            await require_exact(running, other, kept(chat=chat, stopping={"max_tokens": 400}), is_lost=is_lost)


@pytest.mark.parametrize("is_lost", [False, True], ids=["kept", "lost"])
async def test_an_answer_of_an_adapter_goes_on(tmp_path: Path, is_lost: bool) -> None:
    save_adapter(tmp_path / "first", DEMO, seed=1)
    workers = []
    for role in ("prefill", "decode"):
        config = demo_worker(role)
        lora = {"folder": tmp_path, "max_loaded": 2}
        engine = config.engine.model_validate({**config.engine.model_dump(), "lora": lora})
        workers.append(config.model_copy(update={"engine": engine}))
    async with routers(*workers) as (running, other):
        await eventually(lambda: all(one.loras.is_reported for one in running.cluster.workers))
        request = kept(
            prompt="Sort: pear",
            lora_name="first",
            sampling={"temperature": 0},
            stopping={"max_tokens": 30, "ignore_eos": True},
        )
        await require_exact(running, other, request, is_lost=is_lost)


async def test_a_reader_that_is_slow_gets_the_same_from_another_router() -> None:
    workers = [multimodal("p1", "prefill"), multimodal("d1", "decode", decode_step_seconds=0.0005)]
    async with routers(*workers) as (running, other):
        request = kept(prompt="slow", stopping={"max_tokens": 1500, "ignore_eos": True}, sampling={"seed": 3})
        expected = await read(running.stub.Generate(request), Received(request))
        received = Received(request)
        call = running.stub.Generate(request)
        async for message in call:
            received.add(message)
            await asyncio.sleep(0.004)
            if received.tokens > 600:
                call.cancel()
                break
        async for message in other.ResumeGeneration(received.resume(with_copy=False)):
            received.add(message)
            await asyncio.sleep(0.002)
        assert received.whole == expected.whole
