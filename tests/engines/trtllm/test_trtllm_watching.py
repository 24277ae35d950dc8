"""A TensorRT-LLM engine that says it is well, and whether it is: slow readers, aborts, canaries, watchdogs, traces."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from baton.inference.v1 import generate_pb2
from fake_tensorrt_llm.llm import RUNNING
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support import trtllm
from support.bench import PATIENCE_SECONDS, bench, eventually
from support.engine_calls import collect, greedy, until
from support.scraping import sample

from rpc.calls import unary
from rpc.channels import open_channel
from rpc.errors import EngineFailed, Overloaded
from services.config import WorkerConfig
from services.engine import Engine
from services.engines.purpose import Purpose
from services.engines.trtllm import loading
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.detached import detached
from services.engines.trtllm.opening import open_trtllm
from services.prompt import Prompt

PROMPT = Prompt(tuple(range(10, 60)))
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest_asyncio.fixture
async def engine(newest: None, checkpoint: Path) -> AsyncIterator[Engine]:
    async with trtllm.open_engine(checkpoint) as opened:
        yield opened


async def test_an_answer_that_nobody_reads_is_aborted(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, slow_reader_seconds=0.2) as engine:
        RUNNING[0].step_seconds = 0.02
        before = sample("baton_trtllm_stalled_readers_total")
        async with aclosing(engine.decode(PROMPT, greedy(190))) as stream:
            await anext(stream)
            await until(lambda: engine.load().running == 0)
            with pytest.raises(Overloaded, match="nobody has read"):
                await collect(stream)
        assert sample("baton_trtllm_stalled_readers_total") == before + 1


async def test_an_answer_that_is_read_may_take_its_time(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, slow_reader_seconds=0.2) as engine:
        RUNNING[0].step_seconds = 0.02
        assert len((await collect(engine.decode(PROMPT, greedy(30)))).ids) == 30


async def test_aborts_are_counted(engine: Engine) -> None:
    before = sample("baton_trtllm_aborts_total", when="decoding")
    async with aclosing(engine.decode(PROMPT, greedy(150))) as stream:
        await anext(stream)
    assert sample("baton_trtllm_aborts_total", when="decoding") == before + 1


async def test_an_abort_that_breaks_is_survived(engine: Engine) -> None:
    RUNNING[0].abort_fails = True
    stream = engine.decode(PROMPT, greedy(40))
    await anext(stream)
    await stream.aclose()
    await until(lambda: engine.load().running == 0)
    assert engine.healthy


async def test_an_idle_engine_that_does_not_answer_is_found_out(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, canary_seconds=0.1, canary_patience_seconds=0.3) as engine:
        RUNNING[0].frozen = True
        await until(lambda: not engine.healthy)
        RUNNING[0].frozen = False


async def test_an_idle_engine_that_answers_stays_well(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, canary_seconds=0.1, canary_patience_seconds=0.3) as engine:
        asked = RUNNING[0].requests
        await until(lambda: RUNNING[0].requests >= asked + 3)
        assert engine.healthy


async def test_a_decode_worker_is_not_tried(newest: None, checkpoint: Path) -> None:
    settings = trtllm.settings(checkpoint, canary_seconds=0.05, canary_patience_seconds=0.3)
    async with open_trtllm(TrtllmConfig.model_validate(settings), Purpose(("decode",))):
        asked = RUNNING[0].requests
        await asyncio.sleep(0.3)
        assert RUNNING[0].requests == asked


async def test_iterations_are_progress_also_without_output(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, stall_seconds=1.1) as engine:
        RUNNING[0].is_silent = True
        reading = asyncio.ensure_future(collect(engine.decode(PROMPT, greedy(190))))
        RUNNING[0].step_seconds = 0.02
        await asyncio.sleep(1.5)
        assert engine.healthy
        RUNNING[0].is_silent = False
        await reading


def worker(checkpoint: Path, **engine: object) -> WorkerConfig:
    leases = {"lease_seconds": trtllm.TRANSFER_SECONDS / 2}
    settings = trtllm.settings(checkpoint, name="demo", **engine)
    return WorkerConfig.model_validate(
        {"worker_id": "d1", "roles": ["decode"], "engine": settings, "handoff": leases, "drain_seconds": 0}
    )


async def test_a_worker_whose_engine_is_stuck_says_not_serving_and_ends(newest: None, checkpoint: Path) -> None:
    async with bench(worker(checkpoint, stall_seconds=1.1)) as running:
        RUNNING[0].frozen = True
        request = generate_pb2.GenerateRequest(token_ids={"ids": PROMPT.token_ids}, stopping={"max_tokens": 9})
        call = running.stub.Generate(request, timeout=PATIENCE_SECONDS)
        await call.read()
        with pytest.raises(EngineFailed):
            await running.workers["d1"].supervise()
        async with open_channel(running.workers["d1"].address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert (await unary(check)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await eventually(lambda: bool(running.cluster.workers[0].problem))
        call.cancel()
        RUNNING[0].frozen = False


async def test_the_engines_own_span_is_in_the_requests_trace(version: str, checkpoint: Path) -> None:
    args = {"otlp_traces_endpoint": "http://127.0.0.1:4317"}
    async with bench(worker(checkpoint, args={**trtllm.settings(checkpoint)["args"], **args})) as running:  # type: ignore[dict-item]
        request = generate_pb2.GenerateRequest(token_ids={"ids": PROMPT.token_ids}, stopping={"max_tokens": 2})
        metadata = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),)
        async for _ in running.stub.Generate(request, timeout=PATIENCE_SECONDS, metadata=metadata):
            pass
        await eventually(lambda: bool(RUNNING[0].spans))
        assert RUNNING[0].spans[-1].split("-")[1] == TRACE


async def test_its_tracer_is_off_unless_it_is_asked_for(engine: Engine) -> None:
    assert "otlp_traces_endpoint" not in RUNNING[0].given


async def test_an_engine_that_does_not_shut_down_is_left_behind(
    newest: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_SHUTDOWN_SECONDS", 0.2)
    async with trtllm.open_engine(checkpoint):
        RUNNING[0].shutdown_seconds = 3.0
        began = time.monotonic()
    assert time.monotonic() - began < 2


async def test_what_a_detached_call_raises_is_told() -> None:
    with pytest.raises(ZeroDivisionError):
        await detached(lambda: 1 // 0, "test")
    assert await detached(lambda: 7, "test") == 7
