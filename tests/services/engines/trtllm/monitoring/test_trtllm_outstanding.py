"""KV that TensorRT-LLM holds for other workers: counted, shown, limited, and awaited before the engine ends."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from fake_tensorrt_llm.llm import FABRIC, RUNNING
from support.clients.scraping import sample
from support.engines import trtllm
from support.engines.engine_calls import fetch, greedy
from support.eventually import eventually

from discovery.memory import MemoryRegistry
from services.config import WorkerConfig
from services.engines.base import Engine
from services.engines.kv_transfer import EngineHeldKv
from services.engines.prompt import Prompt
from services.server import host_worker

PROMPT = Prompt(tuple(range(10, 60)))

# Longer than anything that a test waits for.
PATIENT = {
    "cache_transceiver_config": {"backend": "NIXL", "max_tokens_in_buffer": 256, "kv_transfer_timeout_ms": 60_000}
}


@pytest_asyncio.fixture
async def engine(newest: None, checkpoint: Path) -> AsyncIterator[Engine]:
    async with trtllm.open_engine(checkpoint) as opened:
        yield opened


async def test_what_waits_to_be_fetched_is_shown_with_its_age(newest: None, checkpoint: Path) -> None:
    # Long enough to be seen on a machine that stands still for a second or two.
    lasting = {"cache_transceiver_config": {**PATIENT["cache_transceiver_config"], "kv_transfer_timeout_ms": 4_000}}
    async with trtllm.open_engine(checkpoint, lasting) as engine:
        await engine.prefill(PROMPT, greedy(9))
        await engine.prefill(PROMPT, greedy(9))
        await eventually(lambda: sample("baton_trtllm_handoffs_outstanding") == 2)
        assert sample("baton_trtllm_handoff_tokens_outstanding") == 100
        await eventually(lambda: sample("baton_trtllm_oldest_handoff_seconds") > 0.3)
        await eventually(lambda: sample("baton_trtllm_handoffs_outstanding") == 0)
        assert sample("baton_trtllm_oldest_handoff_seconds") == 0


async def test_an_engine_that_ends_waits_for_those_who_may_still_be_reading(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint) as engine:
        await engine.prefill(PROMPT, greedy(9))
        llm, held_at = RUNNING[0], time.monotonic()
        assert engine.kv_transfer is not None
        seconds = engine.kv_transfer.fetch_seconds
    assert llm.down
    assert time.monotonic() - held_at >= seconds


async def test_an_engine_that_ends_waits_no_longer_than_the_kv_is_needed(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint) as decoder:
        async with trtllm.open_engine(checkpoint, PATIENT, handoff_deadline_seconds=20.0) as engine:
            held = await engine.prefill(PROMPT, greedy(9))
            assert isinstance(held, EngineHeldKv)
            assert decoder.kv_transfer is not None
            stream = await fetch(held, decoder.kv_transfer, Prompt(PROMPT.token_ids, (held.first_token,)), greedy(9))
            began = time.monotonic()
        assert time.monotonic() - began < 10
        await stream.aclose()


async def test_an_engine_that_has_failed_is_not_waited_for(newest: None, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, PATIENT, handoff_deadline_seconds=20.0) as engine:
        await engine.prefill(PROMPT, greedy(9))
        RUNNING[0].sick = True
        began = time.monotonic()
    assert time.monotonic() - began < 10


async def test_a_worker_that_drains_gives_handoffs_the_time_that_a_fetch_may_take(
    newest: None, checkpoint: Path
) -> None:
    engine = trtllm.settings(checkpoint, PATIENT, handoff_deadline_seconds=3.0)
    config = {"worker_id": "p1", "roles": ["prefill"], "engine": engine, "handoff": {"lease_seconds": 2.0}}
    config = WorkerConfig.model_validate({**config, "drain_seconds": 0})
    async with host_worker(config, MemoryRegistry("test")) as worker:
        held = await worker.engine.prefill(PROMPT, greedy(9))
        lease = worker.leases.hold("r", held, "layout")

        async def renew() -> None:
            while worker.leases.renew(lease.handoff_id):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

        renewing, began = asyncio.create_task(renew()), time.monotonic()
        stages = [stage async for stage in worker.drainer.drain()]
        assert time.monotonic() - began >= 3.0
        assert stages[-1].drained
        await renewing


async def test_kv_that_is_not_fetched_is_back_after_the_engines_own_timeout(engine: Engine) -> None:
    await engine.prefill(PROMPT, greedy(9))
    assert (len(FABRIC), engine.load().blocks_held) == (1, 4)
    await eventually(lambda: not FABRIC and engine.load().blocks_held == 0)
