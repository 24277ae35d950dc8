"""The data-parallel ranks of the simulated engine: caches, events and requests of their own."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from support.cluster.in_process import PATIENT, bench, simulated
from support.engines.engine_calls import collect, greedy, pull
from support.eventually import eventually

from baton.inference.v1 import generate_pb2, sampling_pb2
from router.config import RoutingConfig
from services.engines.kv import PulledKv
from services.engines.kv_events import KvChanged, KvSnapshot
from services.engines.prompt import Prompt, Sampling
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.engine import SimulatedEngine

PROMPT = Prompt(tuple(range(60)))
TWO = SimulatedConfig(data_parallel_ranks=2, num_blocks=32, block_tokens=4, block_bytes=32)


async def cached(engine: SimulatedEngine, prompt: Prompt) -> int:
    return (await collect(engine.decode(prompt, Sampling(max_tokens=2, seed=1)))).finished.cached_tokens


async def test_each_rank_has_a_cache_of_its_own() -> None:
    async with SimulatedEngine(TWO) as engine:
        zero, one = (replace(PROMPT, data_parallel_rank=rank) for rank in (0, 1))
        assert await cached(engine, zero) == 0
        assert await cached(engine, one) == 0
        assert await cached(engine, zero) == 56
        assert engine.load().blocks_total == 64
        assert engine.load().blocks_used == 0


async def test_each_rank_reports_its_own_cache() -> None:
    async with SimulatedEngine(TWO) as engine, aclosing(engine.kv_changes()) as changes:
        assert [await anext(changes) for _ in range(2)] == [KvSnapshot(0, ()), KvSnapshot(1, ())]
        await cached(engine, replace(PROMPT, data_parallel_rank=1))
        change = await anext(changes)
        assert isinstance(change, KvChanged)
        assert change.rank == 1
        assert change.stored


async def test_requests_that_name_no_rank_are_spread() -> None:
    async with SimulatedEngine(TWO.model_copy(update={"decode_step_seconds": 0.01})) as engine:
        running = [
            asyncio.create_task(collect(engine.decode(Prompt((number, 1, 2)), Sampling(max_tokens=30, seed=1))))
            for number in range(6)
        ]
        await eventually(lambda: engine.load().running == 6)
        assert [rank.requests for rank in engine._ranks.all] == [3, 3]
        await asyncio.gather(*running)


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0), (1, 1)])
async def test_kv_moves_from_any_rank_to_any_other_with_the_same_ids(source: int, target: int) -> None:
    async with SimulatedEngine(TWO) as owner, SimulatedEngine(TWO) as reader:
        alone = await collect(owner.decode(PROMPT, greedy(8)))
        held = await owner.prefill(replace(PROMPT, data_parallel_rank=source), greedy(8))
        prompt = replace(PROMPT, emitted=(held.first_token,), data_parallel_rank=target)
        reservation = await reader.reserve(prompt, held.num_tokens)
        await pull(owner, held, reader, reservation)
        there = await collect(reader.decode(PulledKv(prompt, reservation), greedy(8)))
        assert (held.first_token, *there.ids) == alone.ids
        assert owner.load().blocks_used == reader.load().blocks_used == 0


async def test_a_router_sends_a_prompt_to_the_rank_that_has_its_prefix() -> None:
    router = PATIENT.model_copy(update={"routing": RoutingConfig(policy="predicted_seconds")})
    sizes: dict[str, object] = {"block_bytes": 64, "prefill_tokens_per_second": 5_000.0}
    workers = (
        simulated("prefill-0", "prefill", data_parallel_ranks=3, **sizes),
        simulated("decode-0", "decode", data_parallel_ranks=2, **sizes),
    )
    apart = generate_pb2.RoutingOptions(topology=generate_pb2.TOPOLOGY_DISAGGREGATED)
    async with bench(*workers, router=router) as running:
        for cached in (0, 592):
            for seed in range(3):
                ids = generate_pb2.TokenIds(ids=[(seed * 7919 + index * (seed + 3)) % 251 for index in range(600)])
                stopping = sampling_pb2.StoppingOptions(max_tokens=3)
                answer = await running.generate(token_ids=ids, routing=apart, stopping=stopping)
                assert answer.finished.usage.cached_tokens == cached
