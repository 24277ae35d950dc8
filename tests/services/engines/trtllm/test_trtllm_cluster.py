"""The TensorRT-LLM engine on the stand-in, behind real gRPC and a real router."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fake_tensorrt_llm.llm import FABRIC, RUNNING, node_of
from fake_tensorrt_llm.tables import TABLES
from grpc.aio import AioRpcError
from support.cluster.in_process import FAST_ROUTER, Bench, bench
from support.engines import trtllm
from support.engines.engine_calls import greedy
from support.eventually import PATIENCE_SECONDS, eventually

from baton.errors import EngineFailed
from baton.inference.v1 import generate_pb2
from discovery.memory import MemoryRegistry
from router.config import ProbeConfig, RetryConfig
from services.config import WorkerConfig
from services.engines.prompt import Prompt
from services.server import host_worker

TOKENS = {"ids": list(range(10, 60))}
SAMPLED = {"temperature": 0.8, "seed": 7}


def worker(
    worker_id: str, role: str, checkpoint: Path, node_id: int | None, args: dict[str, object] | None = None
) -> WorkerConfig:
    engine = trtllm.settings(checkpoint, args, node_id=node_id, name="demo")
    return WorkerConfig.model_validate(
        {
            "worker_id": worker_id,
            "roles": [role],
            "engine": engine,
            "handoff": {"lease_seconds": trtllm.TRANSFER_SECONDS / 2},
            "drain_seconds": 0,
        }
    )


@pytest_asyncio.fixture
async def pair(version: str, checkpoint: Path) -> AsyncIterator[Bench]:
    async with bench(worker("p1", "prefill", checkpoint, 1), worker("d1", "decode", checkpoint, 2)) as running:
        yield running


def ask(max_tokens: int, **fields: object) -> dict[str, object]:
    stopping = {"max_tokens": max_tokens, "ignore_eos": True}
    return {"token_ids": TOKENS, "sampling": SAMPLED, "stopping": stopping, **fields}


@pytest.mark.feature("prefill and decode on different workers", engine="trtllm", facade="grpc")
async def test_an_answer_over_two_workers_is_that_of_one(pair: Bench) -> None:
    apart = await pair.generate(**ask(20))
    whole = await pair.generate(**ask(20), routing={"topology": "TOPOLOGY_AGGREGATED"})
    assert apart.placed == ("p1", "d1")
    assert whole.placed == ("", "d1")
    assert apart.token_ids == whole.token_ids
    assert len(apart.token_ids) == 20


async def test_draft_tokens_of_the_prompt_reach_decode(newest: None, checkpoint: Path) -> None:
    args = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}}
    engines = [worker(f"{role[0]}{n}", role, checkpoint, n, args) for n, role in enumerate(("prefill", "decode"))]
    async with bench(*engines) as running:
        assert (await running.generate(**ask(20))).placed == ("p0", "d1")
        assert RUNNING[1].drafts == [[3, 1, 2]]


async def test_kv_is_fetched_by_the_endpoint_that_the_python_transceiver_names(newest: None, checkpoint: Path) -> None:
    transceiver = {**trtllm.settings(checkpoint)["args"]["cache_transceiver_config"], "transceiver_runtime": "PYTHON"}  # type: ignore[index]
    args = {"cache_transceiver_config": transceiver}
    engines = [worker(f"{role[0]}{n}", role, checkpoint, n, args) for n, role in enumerate(("prefill", "decode"))]
    async with bench(*engines) as running:
        apart = await running.generate(**ask(20))
        whole = await running.generate(**ask(20), routing={"topology": "TOPOLOGY_AGGREGATED"})
        assert (apart.placed, apart.token_ids) == (("p0", "d1"), whole.token_ids)


async def test_nothing_is_held_after_an_answer(pair: Bench) -> None:
    await pair.generate(**ask(20))
    assert pair.used_blocks() == 0
    assert not FABRIC


@pytest.mark.feature("logprobs", engine="trtllm", facade="grpc")
async def test_every_token_has_its_logprob_on_either_side_of_the_handoff(pair: Bench, version: str) -> None:
    if "first_gen_log_probs" not in TABLES[version].handoff:
        with pytest.raises(AioRpcError, match=rf"{version} cannot hand log probabilities over"):
            await pair.generate(**ask(6), response={"logprobs": 2})
        return
    stream = await pair.generate(**ask(6), response={"logprobs": 2})
    reports = [report for message in stream.messages for report in message.token.logprobs]
    assert [report.token_id for report in reports] == stream.token_ids
    assert all(len(report.top) == 2 for report in reports)


async def test_one_token_never_reaches_decode(pair: Bench) -> None:
    stream = await pair.generate(**ask(1))
    assert stream.placed == ("p1", "")
    assert len(stream.token_ids) == 1


@pytest.mark.feature("cancellation", engine="trtllm", facade="grpc")
async def test_a_client_that_leaves_ends_its_request_inside_the_engines(pair: Bench) -> None:
    call = pair.stub.Generate(generate_pb2.GenerateRequest(**ask(190)), timeout=PATIENCE_SECONDS)  # type: ignore[arg-type]
    async for message in call:
        if message.sequence > 2:
            break
    call.cancel()
    await eventually(lambda: all(one.engine.load().running == 0 for one in pair.workers.values()))
    await eventually(lambda: pair.used_blocks() == 0)


@pytest.mark.feature("recovery from a lost decode worker", engine="trtllm", facade="grpc")
async def test_an_answer_goes_on_elsewhere_when_its_decode_engine_fails(version: str, checkpoint: Path) -> None:
    configs = [worker("p1", "prefill", checkpoint, 1), *(worker(f"d{n}", "decode", checkpoint, n) for n in (2, 3))]
    async with bench(*configs) as running:
        expected = (await running.generate(**ask(150))).token_ids
        got: list[int] = []
        call = running.stub.Generate(generate_pb2.GenerateRequest(**ask(150)), timeout=PATIENCE_SECONDS)  # type: ignore[arg-type]
        async for message in call:
            got += message.token.token_ids
            if len(got) > 5 and not any(llm.crash for llm in RUNNING):
                next(llm for llm in RUNNING if llm.is_busy).crash = RuntimeError("CUDA error")
        assert got == expected


async def test_an_engine_that_has_ended_costs_no_request_however_many_come_before_the_next_health_check(
    newest: None, checkpoint: Path
) -> None:
    """It failed each one at once, looked idle, got the next ones, and the router's budget of retries was spent."""
    engines = [worker(f"p{n}", "prefill", checkpoint, n) for n in (1, 2)]
    update = {"retry": RetryConfig(budget_floor=4, budget_ratio=0.0), "probe": ProbeConfig(interval_seconds=30.0)}
    router = FAST_ROUTER.model_copy(update=update)
    async with bench(*engines, worker("d1", "decode", checkpoint, 3), router=router) as running:
        expected = (await running.generate(**ask(3))).token_ids
        ended = running.workers["p1"].engine
        RUNNING[0].crash = RuntimeError("CUDA error")
        with pytest.raises(EngineFailed):
            await ended.prefill(Prompt((5, 6, 7)), greedy(9))
        for _ in range(30):
            assert (await running.generate(**ask(3))).token_ids == expected


async def test_a_worker_whose_engine_failed_ends(pair: Bench) -> None:
    RUNNING[0].sick = True
    with pytest.raises(EngineFailed):
        await pair.workers["p1"].watch_engines()


async def test_workers_without_a_number_get_different_ones_from_the_registry(newest: None, checkpoint: Path) -> None:
    registry = MemoryRegistry("test")
    first, second = (worker(f"p{n}", "prefill", checkpoint, None) for n in (1, 2))
    async with host_worker(first, registry) as one, host_worker(second, registry) as two:
        for running in (one, two):
            await running.engine.prefill(Prompt((5, 6, 7)), greedy(9))
        assert {node_of(number) for number in FABRIC} == {(0, 0), (0, 1)}
