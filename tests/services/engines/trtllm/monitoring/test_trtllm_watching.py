"""The health of a TensorRT-LLM engine: slow readers, aborts, canaries, watchdogs, traces."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
from fake_tensorrt_llm.llm import RUNNING
from fake_tensorrt_llm.mm_encoder import ENCODERS
from fake_tensorrt_llm.tables import TABLES
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.scraping import counts, sample
from support.clock import RunningClock
from support.cluster.in_process import bench
from support.engines import trtllm
from support.engines.checkpoints import DEMO
from support.engines.engine_calls import collect, greedy
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import unary
from baton.errors import EngineFailed, Overloaded
from baton.inference.v1 import generate_pb2
from rpc.channels import open_channel
from runtime.threads import daemon_call
from services.config import WorkerConfig
from services.engines.base import Engine
from services.engines.context import EngineContext
from services.engines.external import package
from services.engines.prompt import Prompt
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.factory import open_trtllm, open_trtllm_encoder
from services.engines.trtllm.requests import inflight

PROMPT = Prompt(tuple(range(10, 60)))
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest_asyncio.fixture
async def engine(newest: None, checkpoint: Path) -> AsyncIterator[Engine]:
    async with trtllm.open_engine(checkpoint) as opened:
        yield opened


async def test_an_answer_that_is_not_read_is_aborted(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, slow_reader_seconds=0.2) as engine:
        RUNNING[0].step_seconds = 0.02
        before = sample("baton_trtllm_stalled_readers_total")
        async with aclosing(engine.decode(PROMPT, greedy(190))) as stream:
            await anext(stream)
            await eventually(lambda: engine.load().running == 0)
            with pytest.raises(Overloaded, match="was not read"):
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


def requests(engine: Engine) -> int:
    load = engine.load()
    return load.running + load.waiting


async def test_a_request_that_is_aborted_while_it_waits_ends_although_the_engine_does_not_answer(
    version: str, checkpoint: Path
) -> None:
    async with trtllm.open_engine(checkpoint, {"max_batch_size": 1}, canary_seconds=0.1, stall_seconds=5.0) as engine:
        RUNNING[0].step_seconds = 0.02
        async with aclosing(engine.decode(PROMPT, greedy(190))) as running:
            await anext(running)
            waiting = asyncio.ensure_future(anext(engine.decode(PROMPT, greedy(2))))
            await eventually(lambda: requests(engine) == 2)
            waiting.cancel()
            await asyncio.wait([waiting])
            await eventually(lambda: requests(engine) == 1)
        asked = RUNNING[0].requests
        await eventually(lambda: RUNNING[0].requests > asked)
        assert engine.healthy


async def test_an_abort_that_the_engine_does_not_answer_is_counted_and_no_progress(checkpoint: Path) -> None:
    with trtllm.trtllm("1.2.0"):
        async with trtllm.open_engine(checkpoint, {"max_batch_size": 1}, stall_seconds=1.1) as engine:
            before = sample("baton_trtllm_unanswered_aborts_total") or 0
            RUNNING[0].frozen = True
            readings = [asyncio.ensure_future(anext(engine.decode(PROMPT, greedy(2)))) for _ in range(2)]
            await eventually(lambda: requests(engine) == 2)
            readings[1].cancel()
            await asyncio.wait([readings[1]])
            assert sample("baton_trtllm_unanswered_aborts_total") == before + 1
            await eventually(lambda: not engine.healthy)
            readings[0].cancel()
            RUNNING[0].frozen = False


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, TypeError, AssertionError])
async def test_an_abort_that_breaks_is_survived(engine: Engine, error: type[Exception]) -> None:
    RUNNING[0].abort_fails = error("abort is broken in this build")
    stream = engine.decode(PROMPT, greedy(40))
    await anext(stream)
    await stream.aclose()
    await eventually(lambda: engine.load().running == 0)
    assert engine.healthy


async def test_an_idle_engine_that_does_not_answer_is_found_out(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, canary_seconds=0.1, canary_patience_seconds=0.3) as engine:
        RUNNING[0].frozen = True
        await eventually(lambda: not engine.healthy)
        RUNNING[0].frozen = False


async def test_an_idle_engine_that_answers_stays_well(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, canary_seconds=0.1, canary_patience_seconds=5.0) as engine:
        asked = RUNNING[0].requests
        await eventually(lambda: RUNNING[0].requests >= asked + 3)
        assert engine.healthy


async def test_a_decode_worker_that_does_not_answer_is_found_out(newest: None, checkpoint: Path) -> None:
    settings = trtllm.settings(checkpoint, canary_seconds=0.05, canary_patience_seconds=3.0)
    async with open_trtllm(TrtllmConfig.model_validate(settings), EngineContext(("decode",))) as engine:
        asked = RUNNING[0].requests
        await eventually(lambda: RUNNING[0].requests > asked)
        assert engine.healthy
        RUNNING[0].frozen = True
        await eventually(lambda: not engine.healthy)
        RUNNING[0].frozen = False


async def test_an_engine_that_hangs_at_its_work_is_found_out_long_before_it_stalls(
    newest: None, checkpoint: Path
) -> None:
    async with trtllm.open_engine(checkpoint, canary_seconds=0.1, canary_patience_seconds=0.3) as engine:
        RUNNING[0].step_seconds = 0.02
        async with aclosing(engine.decode(PROMPT, greedy(150))) as stream:
            await anext(stream)
            RUNNING[0].frozen = True
            await eventually(lambda: not engine.healthy)
            RUNNING[0].frozen = False


def test_a_hung_engine_is_found_within_15_seconds_by_default(checkpoint: Path) -> None:
    config = TrtllmConfig(model=checkpoint)
    assert (config.canary_seconds or 0) * 1.1 + config.canary_patience_seconds < 14


async def test_iterations_are_progress_also_without_output(
    newest: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = RunningClock()
    monkeypatch.setattr(inflight, "time", SimpleNamespace(monotonic=clock.now))
    async with trtllm.open_engine(checkpoint, stall_seconds=60) as engine:
        RUNNING[0].is_silent = True
        reading = asyncio.ensure_future(collect(engine.decode(PROMPT, greedy(190))))
        RUNNING[0].step_seconds = 0.02
        await eventually(lambda: engine.load().running == 1)
        clock.advance(61)
        # The next iteration is progress.
        await eventually(lambda: engine.healthy)
        assert not reading.done()
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
            await running.workers["d1"].watch_engines()
        async with open_channel(running.workers["d1"].address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
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
        knows_headers = "trace_headers" in TABLES[version].generate
        assert RUNNING[0].spans[-1].split("-")[1:2] == ([TRACE] if knows_headers else [])


async def test_its_tracer_is_off_unless_it_is_asked_for(engine: Engine) -> None:
    assert "otlp_traces_endpoint" not in RUNNING[0].given


async def test_an_engine_that_does_not_shut_down_is_left_behind(
    newest: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "_SHUTDOWN_SECONDS", 0.2)
    async with trtllm.open_engine(checkpoint):
        RUNNING[0].shutdown_seconds = 8.0
        began = time.monotonic()
    assert time.monotonic() - began < 6


async def test_what_a_detached_call_raises_is_told() -> None:
    with pytest.raises(ZeroDivisionError):
        await daemon_call(lambda: 1 // 0, "test")
    assert await daemon_call(lambda: 7, "test") == 7


async def test_trtllms_own_metrics_do_not_count_the_tests(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, canary_seconds=0.05, canary_patience_seconds=60.0) as engine:
        asked, before = RUNNING[0].requests, counts()
        await eventually(lambda: RUNNING[0].requests >= asked + 5)
        tested = counts()
        await collect(engine.decode(PROMPT, greedy(3)))
        await eventually(lambda: _requests(counts()) != _requests(before))
    assert _requests(tested) == _requests(before)


def _requests(found: dict[str, float]) -> dict[str, float]:
    """Without those of iterations, which TensorRT-LLM counts whatever they compute."""
    return {name: value for name, value in found.items() if name.startswith("trtllm_") and "iter" not in name}


async def test_an_idle_trtllm_encoder_that_hangs_is_found(newest: None) -> None:
    config = TrtllmConfig.model_validate(
        {**trtllm.settings(DEMO), "args": {}, "canary_seconds": 0.3, "canary_patience_seconds": 1.0}
    )
    going_on = threading.Event()
    async with open_trtllm_encoder(config, EngineContext()) as encoder:
        await eventually(lambda: encoder._canary._slowest_seconds is not None)  # type: ignore[attr-defined]
        generate = ENCODERS[0].generate
        ENCODERS[0].generate = lambda asked: (going_on.wait(), generate(asked))[1]  # type: ignore[method-assign]
        await eventually(lambda: not encoder.responsive)
        await eventually(lambda: not encoder.healthy)
        assert encoder.load().running == 0
        going_on.set()
        await eventually(lambda: encoder.healthy and encoder.responsive)
