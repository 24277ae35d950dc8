"""Requests go where they are predicted to cost the least, over the wire and on simulated workers."""

import asyncio
from collections import Counter

import pytest
from support.cluster.in_process import PATIENT, Bench, bench, simulated
from support.eventually import eventually

from baton.inference.v1 import cluster_service_pb2, generate_pb2, sampling_pb2, timing_pb2
from router.config import RouterConfig, RoutingConfig
from services.config import WorkerConfig

PREDICTED: RouterConfig = PATIENT.model_copy(update={"routing": RoutingConfig(policy="predicted_seconds")})
APART = generate_pb2.RoutingOptions(topology=generate_pb2.TOPOLOGY_DISAGGREGATED)
TOKENS = 600
ONE = sampling_pb2.StoppingOptions(max_tokens=1)
ENGINE: dict[str, object] = {"block_bytes": 64, "prefill_tokens_per_second": 10_000.0}


def ids(seed: int, count: int = TOKENS) -> generate_pb2.TokenIds:
    return generate_pb2.TokenIds(ids=[(seed * 7919 + index * (seed + 3)) % 251 for index in range(count)])


def prefills(count: int, **engine: object) -> list[WorkerConfig]:
    return [simulated(f"prefill-{index}", "prefill", **{**ENGINE, **engine}) for index in range(count)]


def decode(**engine: object) -> WorkerConfig:
    return simulated("decode-0", "decode", **{**ENGINE, **engine})


def is_idle(running: Bench, worker_id: str) -> bool:
    """True if the router has heard that a worker runs nothing."""
    return all(not each.requests for each in running.cluster.workers if each.record.worker_id == worker_id)


async def ask(running: Bench, seed: int, routing: generate_pb2.RoutingOptions = APART, **fields: object) -> str:
    """The worker of the prompt."""
    stopping = sampling_pb2.StoppingOptions(max_tokens=2)
    answer = await running.generate(token_ids=ids(seed), routing=routing, stopping=stopping, **fields)
    place: str = answer.finished.prefill_worker_id
    return place


async def cached_tokens(running: Bench, seed: int = 1) -> dict[str, int]:
    """The part of a prompt that the router believes each place to have, by prefill worker."""
    explained = await running.operators.ExplainRoute(
        cluster_service_pb2.ExplainRouteRequest(request=generate_pb2.GenerateRequest(token_ids=ids(seed)))
    )
    return {each.prefill_worker_id: each.cached_tokens for each in explained.candidates}


@pytest.mark.parametrize("kv_events", [True, False])
async def test_a_prompt_goes_where_its_prefix_is(kv_events: bool) -> None:
    async with bench(*prefills(3, kv_events=kv_events), decode(kv_events=kv_events), router=PREDICTED) as running:
        first = {seed: await ask(running, seed) for seed in range(6)}
        assert len(set(first.values())) == 3
        again = {seed: await ask(running, seed) for seed in range(6)}
        assert again == first


async def test_a_hot_prefix_spreads_when_its_queue_costs_more_than_to_compute_it_again() -> None:
    async with bench(*prefills(4, prefill_tokens_per_second=10_000.0), decode(), router=PREDICTED) as running:
        for seed in range(8):
            await ask(running, seed)
        seeds = [0 if number % 10 else number for number in range(200)]
        places = Counter(await asyncio.gather(*(ask(running, seed) for seed in seeds)))
        assert len(places) == 4
        assert max(places.values()) <= 100


async def test_a_prompt_whose_prefix_is_on_the_decode_worker_runs_there() -> None:
    slow: dict[str, object] = {"prefill_tokens_per_second": 4_000.0}
    async with bench(*prefills(1, **slow), decode(**slow), router=PREDICTED) as running:
        alone = generate_pb2.RoutingOptions(topology=generate_pb2.TOPOLOGY_AGGREGATED)
        for seed in range(4):
            assert await ask(running, seed, APART) == "prefill-0"
            assert await ask(running, 10 + seed, alone) == ""
            # A short one, so that what a token costs is told from what a prompt costs.
            await running.generate(token_ids=ids(20 + seed, 32), routing=alone, stopping=ONE)
        await eventually(lambda: is_idle(running, "decode-0"))
        assert await ask(running, 13, generate_pb2.RoutingOptions()) == ""


async def test_a_worker_that_comes_back_is_not_believed_to_have_its_cache() -> None:
    configs = prefills(2)
    async with bench(*configs, decode(), router=PREDICTED) as running:
        place = await ask(running, 1)
        await running.stop(place)
        await running.ready(2)
        other = await ask(running, 1)
        assert other != place
        await running.start(next(each for each in configs if each.worker_id == place))
        await running.ready(3)
        # Where it is computed now depends on what the handoffs took, too.
        cached = await cached_tokens(running)
        assert (cached[place], cached[other]) == (0, TOKENS - TOKENS % 16)


async def test_a_salt_keeps_prompts_apart() -> None:
    async with bench(*prefills(2), decode(), router=PREDICTED) as running:
        stopping = sampling_pb2.StoppingOptions(max_tokens=1)
        for salt, cached in (("a", 0), ("b", 0), ("a", TOKENS - TOKENS % 16)):
            routing = generate_pb2.RoutingOptions(cache_salt=salt)
            answer = await running.generate(token_ids=ids(1), routing=routing, stopping=stopping)
            assert answer.finished.usage.cached_tokens >= cached - 16
            assert (answer.finished.usage.cached_tokens > 0) == bool(cached)


async def test_the_second_turn_of_a_conversation_moves_only_its_new_blocks() -> None:
    async with bench(*prefills(1), decode(), router=PREDICTED) as running:
        stopping = sampling_pb2.StoppingOptions(max_tokens=40, ignore_eos=True)
        turn = list(ids(1).ids)
        first = await running.generate(token_ids=ids(1), routing=APART, stopping=stopping)
        turn += [*first.token_ids, *ids(2, 100).ids]
        second = await running.generate(token_ids=generate_pb2.TokenIds(ids=turn), routing=APART, stopping=stopping)
        moved = next(timing for timing in second.finished.timings if timing.stage == timing_pb2.STAGE_HANDOFF_TRANSFER)
        # The decode worker has the prompt and all of the answer but its last token.
        old = (TOKENS + 39) // 16
        assert (moved.cached_bytes, moved.num_bytes) == (old * 64, (-(-len(turn) // 16) - old) * 64)


async def test_an_answer_of_one_token_leaves_nothing_on_the_decode_worker() -> None:
    async with bench(*prefills(1), decode(), router=PREDICTED) as running:
        for _ in range(3):
            stopping = sampling_pb2.StoppingOptions(max_tokens=1)
            await running.generate(token_ids=ids(1), routing=APART, stopping=stopping)
        assert await cached_tokens(running) == {"": 0, "prefill-0": TOKENS - TOKENS % 16}
