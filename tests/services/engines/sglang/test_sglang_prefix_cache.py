"""The events of SGLang's own prefix cache: routers know what a running engine has cached, and nothing else."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

import pytest
import pytest_asyncio
from support.cluster.in_process import PATIENT, bench
from support.engines import sglang
from support.engines.engine_calls import collect, greedy
from support.engines.lent import LentConfig, lent_kind, lent_worker
from support.eventually import PATIENCE_SECONDS, eventually

from baton.engine.v1 import worker_pb2, worker_pb2_grpc
from baton.inference.v1 import cluster_service_pb2, generate_pb2
from engine_protocol.prefix_hash import block_hashes
from router.config import RoutingConfig
from rpc.channels import open_channel
from runtime.aio import timeout
from services.engines.kv_events import KvChanged, KvSnapshot
from services.engines.prompt import Prompt
from services.engines.sglang.engine import SglangEngine

pytestmark = [pytest.mark.requires_sglang, pytest.mark.usefixtures("end_of_sglang"), pytest.mark.timeout(600)]

SIZE = sglang.BLOCK_TOKENS
# Of a prompt that is computed again, SGLang computes the last token at least.
LENGTHS = (100, 104)


async def _emptied(engine: SglangEngine) -> SglangEngine:
    await eventually(lambda: engine.load().blocks_used == 0)
    await engine.llm.tokenizer_manager.flush_cache(timeout_s=20.0)
    await _until(engine, set())
    return engine


@pytest_asyncio.fixture
async def whole() -> AsyncIterator[SglangEngine]:
    with sglang.installed():
        # On a GPU all start at the same time.
        others: tuple[sglang.Side, ...] = ("whole-2", "prefill", "decode") if sglang.ON_GPU else ()
        async with sglang.SHARED.lend("whole", *others) as engine:
            assert isinstance(engine, SglangEngine)
            yield await _emptied(engine)


async def _other(side: sglang.Side) -> SglangEngine:
    async with sglang.SHARED.lend(side) as engine:
        assert isinstance(engine, SglangEngine)
        return engine


def _prompt(first: int, length: int, salt: str = "", shared: int = 0) -> Prompt:
    """A prompt whose first `shared` tokens are those of all others."""
    ids = [
        (7 * index * index + (0 if index < shared else 31 * first) + 3 * index) % 300 + 10 for index in range(length)
    ]
    return Prompt(tuple(ids), cache_salt=salt)


async def held(engine: SglangEngine) -> set[bytes]:
    """All blocks that a router that comes now is told of."""
    assert engine.kv_events is not None
    async with aclosing(engine.kv_events.kv_changes()) as changes:
        snapshot = await anext(changes)
    assert isinstance(snapshot, KvSnapshot)
    return set(snapshot.block_hashes)


async def _until(engine: SglangEngine, wanted: set[bytes], holds: Callable[[set[bytes]], bool] | None = None) -> None:
    """Follows the events until exactly `wanted` is held, or until `holds` is true of what is held."""
    is_reached = holds or wanted.__eq__
    assert engine.kv_events is not None
    now: set[bytes] | None = None
    try:
        async with timeout(PATIENCE_SECONDS), aclosing(engine.kv_events.kv_changes()) as changes:
            async for change in changes:
                match change:
                    case KvSnapshot(_, hashes):
                        now = set(hashes)
                    case KvChanged(_, stored, removed):
                        now = ((now or set()) | set(stored)) - set(removed)
                if now is not None and is_reached(now):
                    return
    except TimeoutError as error:
        missing, more = wanted - (now or set()), (now or set()) - wanted
        raise AssertionError(f"{len(missing)} of {len(wanted)} blocks are missing, {len(more)} are too many") from error


async def _answer(engine: SglangEngine, prompt: Prompt, max_tokens: int = 4) -> tuple[set[bytes], int]:
    """Runs a prompt. Returns the blocks that it must leave in the cache, and the tokens that it found there."""
    answer = await collect(engine.decode(prompt, greedy(max_tokens)))
    # The last token has no KV.
    context = (prompt.token_ids + answer.ids)[:-1]
    return set(block_hashes(context, SIZE, prompt.cache_salt)), answer.finished.cached_tokens


async def test_exactly_the_chains_of_prompts_with_a_shared_prefix_are_held(whole: SglangEngine) -> None:
    first, _ = await _answer(whole, _prompt(1, LENGTHS[0], shared=64))
    await _until(whole, first)
    other, cached = await _answer(whole, _prompt(2, LENGTHS[1], shared=64))
    assert cached == 64
    assert len(first & other) == 64 // SIZE
    await _until(whole, first | other)


async def test_prompts_of_equal_text_and_other_salts_share_neither_kv_nor_hashes(whole: SglangEngine) -> None:
    blocks: set[bytes] = set()
    for salt in ("tenant", "", "other"):
        stored, cached = await _answer(whole, _prompt(1, LENGTHS[0], salt))
        assert (cached, stored & blocks) == (0, set())
        blocks |= stored
        await _until(whole, blocks)
    assert (await _answer(whole, _prompt(1, LENGTHS[0], "tenant")))[1] >= LENGTHS[0] // SIZE * SIZE - SIZE


async def test_what_is_evicted_is_held_no_more_and_what_is_held_is_found(whole: SglangEngine) -> None:
    prompts = [_prompt(number, 150, "tenant" if number % 3 == 2 else "") for number in range(12)]
    chains = [(await _answer(whole, each))[0] for each in prompts]
    await _until(whole, chains[-1], chains[-1].issubset)
    now = await held(whole)
    assert 0 < len(now) <= whole.load().blocks_total
    assert now < set().union(*chains)
    assert not chains[0] & now
    found = 0
    for prompt in reversed(prompts[6:]):
        names = block_hashes(prompt.token_ids[:-1], SIZE, prompt.cache_salt)
        now = await held(whole)
        told = next((index for index, name in enumerate(names) if name not in now), len(names))
        stored, cached = await _answer(whole, prompt, 1)
        assert cached == told * SIZE
        # What was evicted for it is told before it.
        await _until(whole, stored, stored.issubset)
        found += told
    assert found > 0


async def test_after_the_cache_is_flushed_nothing_is_held(whole: SglangEngine) -> None:
    blocks, _ = await _answer(whole, _prompt(1, LENGTHS[0]))
    await _until(whole, blocks)
    assert (await whole.llm.tokenizer_manager.flush_cache(timeout_s=20.0)).success
    await _until(whole, set())


async def test_a_prefill_engine_holds_the_prompts_that_it_has_handed_over(whole: SglangEngine) -> None:
    prefill, decode = await _other("prefill"), await _other("decode")
    assert decode.kv_events is None
    await _emptied(prefill)
    prompt = _prompt(3, LENGTHS[0], "tenant")
    room = await decode.allocate(prompt, greedy(4), "127.0.0.1:1")
    await prefill.prefill_into(prompt, greedy(4), room.engine_state)
    await room.release()
    await _until(prefill, set(block_hashes(prompt.token_ids, SIZE, "tenant")))


async def test_a_worker_tells_its_subscribers(whole: SglangEngine) -> None:
    prompt = _prompt(4, LENGTHS[0])
    config = lent_worker("d1", "decode", sglang.LEASE_SECONDS).model_copy(update={"engine": LentConfig(side="whole")})
    with lent_kind(sglang.SHARED.lend):
        async with bench(config, router=PATIENT) as running, open_channel(running.workers["d1"].address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            call = stub.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest(), timeout=PATIENCE_SECONDS)
            first = await call.read()
            assert (first.WhichOneof("event"), list(first.snapshot.block_hashes)) == ("snapshot", [])
            wanted, told = (await _answer(whole, prompt))[0], set[bytes]()
            while told != wanted:
                told |= set((await call.read()).changed.stored)


async def test_the_router_picks_the_worker_that_has_the_prefix_by_events_alone(whole: SglangEngine) -> None:
    other = await _emptied(await _other("whole-2"))
    # The router has seen neither prompt.
    prompts = {"d1": _prompt(5, 150), "d2": replace(_prompt(6, 150), cache_salt="")}
    await _answer(whole, prompts["d1"])
    await _answer(other, prompts["d2"])
    workers = [
        lent_worker(name, "decode", sglang.LEASE_SECONDS).model_copy(update={"engine": LentConfig(side=side)})
        for name, side in (("d1", "whole"), ("d2", "whole-2"))
    ]
    router = PATIENT.model_copy(update={"routing": RoutingConfig(policy="predicted_seconds")})
    with lent_kind(sglang.SHARED.lend):
        async with bench(*workers, router=router) as running:
            for name, prompt in prompts.items():
                ids = generate_pb2.TokenIds(ids=[*prompt.token_ids, 7, 8, 9])
                asked = generate_pb2.GenerateRequest(token_ids=ids, stopping={"max_tokens": 2, "ignore_eos": True})
                explaining = cluster_service_pb2.ExplainRouteRequest(request=asked)
                cached: dict[str, int] = {}
                async with timeout(PATIENCE_SECONDS):
                    while max(cached.values(), default=0) == 0:
                        explained = await running.operators.ExplainRoute(explaining)
                        cached = {each.decode_worker_id: each.cached_tokens for each in explained.candidates}
                assert cached == {"d1": 0, "d2": 0, name: 150 // SIZE * SIZE}
                answer = await running.generate(token_ids=ids, stopping={"max_tokens": 2, "ignore_eos": True})
                assert answer.placed == ("", name)
                assert answer.finished.usage.cached_tokens == 150 // SIZE * SIZE
