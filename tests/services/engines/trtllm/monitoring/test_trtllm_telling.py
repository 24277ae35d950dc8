"""The reports of a TensorRT-LLM worker: load, metrics and prefix cache, read by one thread."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fake_tensorrt_llm.llm import RUNNING
from prometheus_client import generate_latest
from support.clients.scraping import sample
from support.cluster.in_process import Bench, bench
from support.engines import trtllm
from support.engines.engine_calls import BLOCK_TOKENS, BLOCKS, MAX_SEQUENCES, collect, greedy
from support.eventually import PATIENCE_SECONDS, eventually

from baton.engine.v1 import worker_pb2, worker_pb2_grpc
from baton.errors import Unsupported
from rpc.channels import open_channel
from runtime.telemetry.metrics import REGISTRY
from services.config import WorkerConfig
from services.engines.base import Engine
from services.engines.kv_events import ReportsKvEvents
from services.engines.prompt import Prompt
from services.engines.pytorch.kv_cache.blocks import HashChain

PROMPT = Prompt(tuple(range(10, 60)))
TOLD = {"tokens_per_block": BLOCK_TOKENS, "max_tokens": BLOCKS * BLOCK_TOKENS, "event_buffer_max_size": 1000}
CHAIN = HashChain("", BLOCK_TOKENS).upto(PROMPT.token_ids, 48)


@pytest_asyncio.fixture
async def engine(version: str, checkpoint: Path) -> AsyncIterator[Engine]:
    async with trtllm.open_engine(checkpoint, {"kv_cache_config": TOLD}) as opened:
        yield opened


def scraped() -> str:
    return generate_latest(REGISTRY).decode()


async def test_one_thread_reads_statistics_and_events(engine: Engine) -> None:
    assert [thread.name for thread in threading.enumerate()].count("trtllm-poller") == 1


async def test_the_thread_ends_with_the_engine(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint):
        pass
    assert not any(thread.name.startswith("trtllm-poller") for thread in threading.enumerate())


async def test_requests_beyond_the_batch_count_as_waiting(engine: Engine) -> None:
    RUNNING[0].step_seconds = 0.05
    streams = [engine.decode(Prompt((5 + index,) * 20), greedy(40)) for index in range(MAX_SEQUENCES + 2)]
    reading = [asyncio.ensure_future(collect(stream)) for stream in streams]
    await eventually(lambda: engine.load().waiting == 2)
    load = engine.load()
    assert (load.running, load.waiting_prefill_tokens) == (MAX_SEQUENCES, 40)
    RUNNING[0].step_seconds = 0.0005
    await asyncio.gather(*reading)
    assert engine.load().waiting == 0


async def test_statistics_of_a_busy_engine_are_read_while_it_is_busy(version: str, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, {"max_batch_size": 1, "kv_cache_config": TOLD}) as engine:
        RUNNING[0].step_seconds = 0.02
        reading = [asyncio.ensure_future(collect(engine.decode(PROMPT, greedy(190)))) for _ in range(2)]
        await eventually(lambda: engine.load().waiting == 1)
        # For longer than statistics are considered fresh, and without another request.
        until_then = RUNNING[0].iterations + 80
        await eventually(lambda: RUNNING[0].iterations >= until_then)
        assert engine.load().waiting == 1
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)


async def test_the_number_of_blocks_is_the_engines(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, {"kv_cache_config": {"tokens_per_block": BLOCK_TOKENS}}) as engine:
        await eventually(lambda: engine.load().blocks_total == 2**20 // BLOCK_TOKENS)


async def test_an_engine_that_tells_nothing_is_well(engine: Engine) -> None:
    RUNNING[0].telling_fails = RuntimeError("no statistics")
    await eventually(lambda: sample("baton_trtllm_polling") == 0)
    assert engine.healthy
    assert len((await collect(engine.decode(PROMPT, greedy(3)))).ids) == 3


async def test_its_own_metrics_are_at_the_same_endpoint_and_nothing_else_of_it(engine: Engine) -> None:
    labels = {"model_name": engine.facts.name, "engine_type": "trtllm"}
    before = sample("trtllm_request_success_total", **labels, finished_reason="length") or 0
    await collect(engine.decode(PROMPT, greedy(3)))
    assert sample("trtllm_request_success_total", **labels, finished_reason="length") == before + 1
    await eventually(lambda: (sample("trtllm_gpu_memory_usage_bytes", **labels) or 0) > 0)
    text = scraped()
    assert "baton_trtllm_polling" in text
    assert "python_other" not in text
    assert text.count("# TYPE trtllm_kv_cache_utilization gauge") == 1


async def test_its_metrics_end_with_it_and_may_come_again(newest: None, checkpoint: Path) -> None:
    for _ in range(2):
        async with trtllm.open_engine(checkpoint):
            assert "trtllm_request_success" in scraped()
        assert "trtllm_request_success" not in scraped()


async def test_tokens_of_blocks_that_were_there_count_as_cached(engine: Engine) -> None:
    assert (await collect(engine.decode(PROMPT, greedy(3)))).finished.cached_tokens == 0
    assert (await collect(engine.decode(PROMPT, greedy(3)))).finished.cached_tokens == 48
    assert (await engine.prefill(PROMPT, greedy(1))).cached_tokens == 48


async def test_a_salt_hides_what_is_cached(engine: Engine) -> None:
    await collect(engine.decode(PROMPT, greedy(3)))
    salted = Prompt(PROMPT.token_ids, cache_salt="mine")
    assert (await collect(engine.decode(salted, greedy(3)))).finished.cached_tokens == 0


async def test_without_a_buffer_for_events_there_are_none(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint) as engine:
        assert isinstance(engine, ReportsKvEvents)
        with pytest.raises(Unsupported, match="event_buffer_max_size"):
            engine.kv_changes()


@pytest_asyncio.fixture
async def single(newest: None, checkpoint: Path) -> AsyncIterator[Bench]:
    engine = trtllm.settings(checkpoint, {"kv_cache_config": TOLD}, name="demo")
    config = WorkerConfig.model_validate(
        {
            "worker_id": "d1",
            "roles": ["decode"],
            "engine": engine,
            "handoff": {"lease_seconds": 0.4},
            "drain_seconds": 0,
        }
    )
    async with bench(config) as running:
        yield running


async def test_routers_are_told_what_is_cached_and_what_is_evicted(single: Bench) -> None:
    async with open_channel(single.workers["d1"].address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest(), timeout=PATIENCE_SECONDS)
        snapshot = await call.read()
        assert (snapshot.WhichOneof("event"), snapshot.sequence) == ("snapshot", 0)
        assert snapshot.epoch == single.workers["d1"].epoch
        await single.generate(token_ids={"ids": PROMPT.token_ids}, stopping={"max_tokens": 2, "ignore_eos": True})
        stored = await call.read()
        assert (list(stored.stored.block_hashes), stored.sequence) == (CHAIN, 1)
        RUNNING[0].cache.room = 0
        await single.generate(token_ids={"ids": PROMPT.token_ids[:20]}, stopping={"max_tokens": 2, "ignore_eos": True})
        gone: list[bytes] = []
        while len(gone) < len(CHAIN):
            gone += (await call.read()).removed.block_hashes
        assert gone == CHAIN


async def test_a_lost_event_is_told_as_a_snapshot_of_nothing(single: Bench) -> None:
    async with open_channel(single.workers["d1"].address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest(), timeout=PATIENCE_SECONDS)
        await call.read()
        before = sample("baton_trtllm_kv_event_gaps_total") or 0
        await single.generate(token_ids={"ids": PROMPT.token_ids}, stopping={"max_tokens": 2, "ignore_eos": True})
        await call.read()
        RUNNING[0].cache.lose_event()
        await single.generate(token_ids={"ids": [9] * 20}, stopping={"max_tokens": 2, "ignore_eos": True})
        after = await call.read()
        assert (after.WhichOneof("event"), list(after.snapshot.block_hashes)) == ("snapshot", [])
        assert sample("baton_trtllm_kv_event_gaps_total") == before + 1
