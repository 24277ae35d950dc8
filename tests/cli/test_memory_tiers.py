"""A worker of the embedded engine with host memory below its pool, behind a router that knows its tiers."""

import asyncio
import itertools
import random

import pytest
from google.protobuf.duration_pb2 import Duration
from support.clients.baton_command import Baton, Outcome
from support.cluster.in_process import FAST_ROUTER, Bench, bench
from support.engines.checkpoints import DEMO
from support.engines.tier_loads import always_loaded
from support.eventually import PATIENCE_SECONDS

from baton.inference.v1 import cluster_service_pb2, generate_pb2, sampling_pb2
from router.config import RoutingConfig
from runtime.aio import timeout
from services.config import HandoffConfig, WorkerConfig
from services.engines.pytorch.config import PyTorchConfig

__all__ = ["always_loaded"]

ROUTER = FAST_ROUTER.model_copy(update={"routing": RoutingConfig(policy="predicted_seconds")})
TIERS = {"host_bytes": 64 << 20, "load_patience_seconds": 60}
# A block of the demo is 48 KiB: the pool holds two prompts.
ENGINE = PyTorchConfig.model_validate(
    {"model": DEMO, "name": "demo", "threads": 1, "kv_cache_bytes": 2 << 20, "tiers": TIERS}
)
WORKER = WorkerConfig(
    worker_id="d1", roles=("decode",), engine=ENGINE, handoff=HandoffConfig(lease_seconds=5.0), drain_seconds=0
)


def request(seed: int, tokens: int = 300) -> dict[str, object]:
    ids = random.Random(seed).choices(range(8, 250), k=tokens)
    return {
        "model": "demo",
        "token_ids": generate_pb2.TokenIds(ids=ids),
        "sampling": sampling_pb2.SamplingParams(temperature=0.0),
        "stopping": sampling_pb2.StoppingOptions(max_tokens=8, ignore_eos=True),
    }


async def candidate(running: Bench, seed: int) -> cluster_service_pb2.RouteCandidate:
    """The predicted cost of the only place for a prompt."""
    asked = cluster_service_pb2.ExplainRouteRequest(request=generate_pb2.GenerateRequest(**request(seed)))  # type: ignore[arg-type]
    [found] = (await running.operators.ExplainRoute(asked)).candidates
    return found


async def until_below(running: Bench) -> None:
    """Waits until the router knows the first prompt in the host memory, and that it is sooner loaded than computed.

    On a busy machine prompts of one length may have taught it that their tokens cost nothing: others follow.
    """
    try:
        async with timeout(PATIENCE_SECONDS):
            for number in itertools.count(1):
                found = await candidate(running, 0)
                if found.host_tokens == found.cached_tokens == 288 and found.load_seconds > 0:
                    return
                await asyncio.sleep(0.02)
                if number % 25 == 0:
                    await running.generate(**request(number, 50 + 10 * number % 400))
    except TimeoutError:
        raise AssertionError(f"not in host memory: {found}") from None


async def retained(baton: Baton, running: Bench) -> Outcome:
    """The listing, once the worker's report has come."""
    async with timeout(PATIENCE_SECONDS):
        while True:
            listed = await baton("workers", "--memory", "--address", running.address)
            if "retains" in listed.out:
                return listed
            await asyncio.sleep(0.1)


@pytest.mark.usefixtures("always_loaded")
async def test_a_prompt_that_went_to_host_memory_is_explained_loaded_and_counted(baton: Baton) -> None:
    async with bench(WORKER, router=ROUTER) as running:
        first = await running.generate(**request(0))
        assert (await candidate(running, 0)).host_tokens == 0
        for seed in range(1, 5):
            await running.generate(**request(seed))

        await until_below(running)
        again = await running.generate(**request(0))
        assert again.token_ids == first.token_ids
        assert again.finished.usage.cached_tokens == again.finished.usage.host_cached_tokens == 288
        retain = generate_pb2.Retention(ttl=Duration(seconds=60), prompt_tokens=64)
        granted = await running.generate(**request(0), cache=generate_pb2.CacheOptions(retain=retain))
        assert granted.finished.usage.retained_tokens == 64
        listed = await retained(baton, running)
    assert listed.code == 0
    assert listed.lines[-1] == "d1: (default) retains 4 blocks, 9.8% of the pool"
    columns = listed.lines[2].split()
    assert columns[0] == "d1"
    assert columns[2].split("/")[1] == str((64 << 20) // (48 << 10))
