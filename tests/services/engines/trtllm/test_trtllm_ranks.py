"""Attention-DP ranks of a TensorRT-LLM worker, as targets of a real router."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.cluster.in_process import Bench, bench
from support.engines import trtllm
from support.engines.engine_calls import BLOCK_TOKENS, BLOCKS, collect, greedy
from support.eventually import PATIENCE_SECONDS

from baton.calls import unary
from baton.engine.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.errors import InvalidRequest
from rpc.channels import open_channel
from services.config import WorkerConfig
from services.engines.prompt import Prompt
from services.engines.trtllm.config import EngineArguments

PROMPT = tuple(range(10, 60))
CACHE = {"tokens_per_block": BLOCK_TOKENS, "max_tokens": BLOCKS * BLOCK_TOKENS, "event_buffer_max_size": 1000}
SPLIT = {"tensor_parallel_size": 2, "enable_attention_dp": True, "kv_cache_config": CACHE}


@pytest_asyncio.fixture
async def split(newest: None, checkpoint: Path) -> AsyncIterator[Bench]:
    config = {
        "worker_id": "d1",
        "roles": ["prefill", "decode"],
        "engine": trtllm.settings(checkpoint, SPLIT, name="demo"),
        "handoff": {"lease_seconds": trtllm.TRANSFER_SECONDS / 2},
        "drain_seconds": 0,
    }
    async with bench(WorkerConfig.model_validate(config)) as running:
        yield running


@pytest.mark.parametrize(("args", "ranks"), [({"enable_attention_dp": True}, 4), ({}, 1)])
def test_there_is_a_rank_for_each_part_with_attention_of_its_own(args: dict[str, object], ranks: int) -> None:
    assert EngineArguments.model_validate({"tensor_parallel_size": 4, **args}).attention_dp_size == ranks


async def test_the_ranks_are_in_the_record(split: Bench) -> None:
    [record] = [worker.record for worker in split.cluster.workers]
    assert record.data_parallel_ranks == 2


async def test_a_session_finds_its_prefix_on_the_rank_that_it_was_computed_on(split: Bench) -> None:
    asked = {"token_ids": {"ids": PROMPT}, "stopping": {"max_tokens": 2, "ignore_eos": True}}
    for session in ("a", "b", "c", "d"):
        usages = [(await split.generate(**asked, routing={"session_key": session})).finished.usage for _ in range(3)]
        assert [usage.cached_tokens for usage in usages[1:]] == [48, 48]


async def test_the_engine_runs_it_on_that_rank_and_no_other(version: str, checkpoint: Path) -> None:
    async with trtllm.open_engine(checkpoint, SPLIT) as engine:
        answers = [
            await collect(engine.decode(Prompt(PROMPT, data_parallel_rank=rank), greedy(2))) for rank in (1, 0, 1)
        ]
        assert [answer.finished.cached_tokens for answer in answers] == [0, 0, 48]


async def test_a_rank_that_there_is_not_is_refused(split: Bench) -> None:
    async with open_channel(split.workers["d1"].address) as channel:
        request = prefill_pb2.PrefillRequest(request_id="r", prompt={"token_ids": PROMPT}, data_parallel_rank=2)
        request.sampling.stop.max_tokens = 4
        with pytest.raises(InvalidRequest, match="data_parallel_rank"):
            await unary(prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(request, timeout=PATIENCE_SECONDS))


async def test_kv_events_say_whose_rank_they_are_of(split: Bench) -> None:
    async with open_channel(split.workers["d1"].address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        engine = split.workers["d1"].engine
        await collect(engine.decode(Prompt(PROMPT, data_parallel_rank=1), greedy(2)))
        call = stub.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest(), timeout=PATIENCE_SECONDS)
        held: dict[int, int] = {}
        while held.get(1) != 3:
            message = await call.read()
            blocks = message.snapshot if message.HasField("snapshot") else message.stored
            held[message.data_parallel_rank] = len(blocks.block_hashes)
        assert held.get(0, 0) == 0
