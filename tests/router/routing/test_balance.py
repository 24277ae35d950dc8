"""Requests that are alike are spread evenly over workers that are alike."""

import asyncio
from collections import Counter
from itertools import count

import pytest
from support.cluster.in_process import FAST_ROUTER, bench, simulated

from router.config import RoutingConfig
from services.config import WorkerConfig


def workers(*roles: str, kv_events: bool = True) -> list[WorkerConfig]:
    engine: dict[str, object] = {"prefill_base_seconds": 0.002, "decode_step_seconds": 0.001, "kv_events": kv_events}
    return [simulated(f"w-{number}", *role.split("+"), **engine) for number, role in enumerate(roles)]


async def busiest(configs: list[WorkerConfig], policy: str, at_once: int) -> float:
    """The answers of the decode worker with the most, over the mean of all decode workers."""
    router = FAST_ROUTER.model_copy(update={"routing": RoutingConfig(policy=policy)})
    requests, numbers, answers = max(240, 10 * at_once), count(), Counter[str]()
    async with bench(*configs, router=router, proxied=False) as running:

        async def lane() -> None:
            # No prompt begins as another does: there is nothing to find in a cache.
            while (number := next(numbers)) < requests:
                answer = await running.generate(prompt=f"{number:04} " + "x" * 395, stopping={"max_tokens": 8})
                answers[answer.finished.decode_worker_id] += 1

        await asyncio.gather(*(lane() for _ in range(at_once)))
    decoders = sum("decode" in config.roles for config in configs)
    return max(answers.values()) / (requests / decoders)


@pytest.mark.parametrize("policy", ["automatic", "least_loaded"])
@pytest.mark.parametrize("at_once", [12, 48])
async def test_three_workers_get_the_same_share_of_equal_requests(policy: str, at_once: int) -> None:
    assert await busiest(workers("decode", "decode", "decode"), policy, at_once) <= 1.10


async def test_so_they_do_where_their_caches_are_estimated() -> None:
    assert await busiest(workers("decode", "decode", "decode", kv_events=False), "automatic", 12) <= 1.10


@pytest.mark.parametrize("policy", ["automatic", "least_loaded"])
@pytest.mark.parametrize("roles", [("prefill", "decode", "decode", "decode"), ("prefill+decode",) * 3])
async def test_three_workers_that_decode_what_others_computed_share_evenly(roles: tuple[str, ...], policy: str) -> None:
    assert await busiest(workers(*roles), policy, 12) <= 1.10
