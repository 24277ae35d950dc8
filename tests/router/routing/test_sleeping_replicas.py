"""Routers and models that sleep: replicas that are awake come first, and the time to wake counts against deadlines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from support.cluster.in_process import FAST_ROUTER, Bench, bench, simulated
from support.eventually import eventually

from baton.inference.v1 import generate_pb2
from router.config import RoutingConfig
from services.config import WorkerConfig
from services.sleeping.config import SleepConfig

POLICIES = ("automatic", "least_loaded")


def _shares(config: WorkerConfig, folder: Path) -> WorkerConfig:
    sleep = SleepConfig(group=folder / "group", group_bytes=3, bytes=2, turn_seconds=0.2)
    return config.model_copy(update={"sleep": sleep})


@asynccontextmanager
async def _cluster(folder: Path, *replicas: str, policy: str = "automatic", **engine: object) -> AsyncIterator[Bench]:
    """`asleep` and these replicas of demo, and `other`, whose model has the memory of the first."""
    roles = ("prefill", "decode")
    asleep = _shares(simulated("asleep", *roles, **engine), folder)
    other = _shares(simulated("other", *roles, name="other", **engine), folder)
    awake = [simulated(name, *roles, **engine) for name in replicas]
    router = FAST_ROUTER.model_copy(update={"routing": RoutingConfig(policy=policy)})
    async with bench(asleep, other, *awake, router=router, proxied=False) as running:
        await eventually(lambda: _seen(running)["asleep"] > 0.0)
        yield running


def _seen(running: Bench) -> dict[str, float]:
    """The time to wake of each worker as the router sees it."""
    return {worker.record.worker_id: worker.wake_seconds for worker in running.cluster.workers}


def _request(number: int = 0, model: str = "demo") -> dict[str, object]:
    return {"model": model, "prompt": f"request {number}", "stopping": {"max_tokens": 8, "ignore_eos": True}}


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_replica_that_is_awake_gets_the_requests(tmp_path: Path, policy: str) -> None:
    async with _cluster(tmp_path, "awake", policy=policy) as running:
        streams = [await running.generate(**_request(number)) for number in range(12)]
        assert {stream.finished.decode_worker_id for stream in streams} == {"awake"}
        assert _seen(running)["other"] == 0.0


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_model_that_sleeps_everywhere_is_woken(tmp_path: Path, policy: str) -> None:
    async with _cluster(tmp_path, policy=policy, wake_seconds=0.1) as running:
        streams = await asyncio.gather(*(running.generate(**_request(number)) for number in range(5)))
        assert {stream.finished.decode_worker_id for stream in streams} == {"asleep"}
        await eventually(lambda: _seen(running)["other"] > 0.1)
        assert (await running.generate(**_request(model="other"))).finished.decode_worker_id == "other"


async def test_a_request_that_cannot_be_answered_in_time_wakes_nobody(tmp_path: Path) -> None:
    async with _cluster(tmp_path, wake_seconds=2.0) as running:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in running.stub.Generate(generate_pb2.GenerateRequest(**_request()), timeout=1.0):  # type: ignore[arg-type]
                pass
        assert "its deadline is in" in str(refused.value.details())
        assert _seen(running)["other"] == 0.0


async def test_no_request_is_lost_at_two_models_that_take_turns(tmp_path: Path) -> None:
    async with _cluster(tmp_path, wake_seconds=0.02, decode_step_seconds=0.002) as running:
        answers = [running.generate(**_request(number, ("demo", "other")[number % 2])) for number in range(60)]
        streams = await asyncio.gather(*answers)
        assert [len(stream.token_ids) for stream in streams] == [8] * 60
        assert running.used_blocks() == 0
