"""Handoffs between two vLLM engines: behind Baton's lease they are right, also where vLLM alone is wrong."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from support.clients.worker_calls import calls_to, decode_request
from support.cluster.in_process import Bench
from support.engines import vllm
from support.engines.engine_calls import collect, disaggregated, greedy
from support.engines.lent import lent_worker
from support.eventually import eventually

from baton.errors import HandoffLost, InvalidRequest, StaleEpoch
from engine_protocol.prefix_hash import block_hash, root_hash
from services.engines.base import Engine
from services.engines.kv_events import KvChanged
from services.engines.kv_transfer import RemoteKv
from services.engines.prompt import Prompt, Sampling
from services.engines.vllm.engine import VllmEngine
from services.engines.vllm.handoff import read_state
from services.engines.vllm.held_kv import VllmHeldKv
from services.handoff.leases import LeaseTable

pytestmark = [pytest.mark.requires_vllm, pytest.mark.usefixtures("end_of_vllm")]

PROMPT = Prompt(tuple((7 * index * index + 3 * index + 11) % 300 + 10 for index in range(150)))
SAMPLED = Sampling(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)


@pytest_asyncio.fixture
async def prefill() -> AsyncIterator[VllmEngine]:
    with vllm.installed():
        async with vllm.SHARED.lend() as engine:
            assert isinstance(engine, VllmEngine)
            yield engine
            await eventually(lambda: engine.load().blocks_used == 0)


@pytest_asyncio.fixture
async def decode(prefill: VllmEngine) -> AsyncIterator[VllmEngine]:
    async with vllm.SHARED.lend() as engine:
        assert isinstance(engine, VllmEngine)
        yield engine
        await eventually(lambda: engine.load().blocks_used == 0)


async def _reuse_every_block(engine: Engine) -> None:
    """Runs other prompts until no block of the pool has its earlier content."""
    for turn in range(3):
        others = [Prompt(tuple((5 * i + 31 * turn + 17 * k) % 300 + 10 for i in range(200))) for k in range(4)]
        await asyncio.gather(*(collect(engine.decode(other, greedy(2))) for other in others))


async def _vllm_alone(engine: VllmEngine, held: VllmHeldKv, prompt: Prompt, max_tokens: int) -> tuple[list[int], str]:
    """Decodes by vLLM's own two-step flow: its state, without Baton's lease and comparison."""
    from vllm import SamplingParams

    state = read_state(held.engine_state, vllm.BLOCK_TOKENS, len(prompt.token_ids))
    transfer = {"kv_transfer_params": dict(state.params)}
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=transfer
    )
    inputs: Any = {"prompt_token_ids": list(prompt.token_ids), "cache_salt": "vllm-alone"}
    async for output in engine.llm.generate(inputs, params, "alone"):
        last = output.outputs[0]
    return list(last.token_ids), last.finish_reason


async def test_vllm_alone_answers_wrongly_from_a_late_pull_and_baton_computes_it_again(
    prefill: VllmEngine, decode: VllmEngine
) -> None:
    expected = (await collect(decode.decode(replace(PROMPT, cache_salt="expected"), greedy(12)))).ids
    async with LeaseTable(lease_seconds=600) as leases:
        alone, behind = [await prefill.prefill(replace(PROMPT, cache_salt=salt), greedy(12)) for salt in "ab"]
        lease = leases.hold("late", behind, prefill.facts.layout.digest)
        await eventually(lambda: not behind.is_held, seconds=4 * vllm.HELD_SECONDS)
        await eventually(lambda: prefill.load().blocks_held == 0)
        await _reuse_every_block(prefill)

        ids, reason = await _vllm_alone(decode, alone, PROMPT, 12)
        assert (tuple(ids) == expected, reason) == (False, "length")

        # Both sides know that the lease has ended, and the owner denies it, whatever the reader has got.
        assert leases.renew(lease.handoff_id) == 0.0
        late = RemoteKv(replace(PROMPT, emitted=(behind.first_token,)), behind.num_tokens, behind.engine_state)
        try:
            stream = await decode.decode_remote(late, greedy(12))
        except HandoffLost:
            pass  # The first token, computed from other KV, differed.
        else:
            await stream.aclose()
        behind.fetched()
        assert not (await leases.release(lease.handoff_id)).still_valid
    # What was read is in no cache that another request could find.
    assert (await collect(decode.decode(PROMPT, greedy(12)))).ids == expected


async def test_a_handoff_within_its_time_is_confirmed(prefill: VllmEngine, decode: VllmEngine) -> None:
    held = await prefill.prefill(PROMPT, greedy(5))
    async with LeaseTable(lease_seconds=600) as leases:
        lease = leases.hold("r", held, prefill.facts.layout.digest)
        source = RemoteKv(replace(PROMPT, emitted=(held.first_token,)), held.num_tokens, held.engine_state)
        stream = await decode.decode_remote(source, greedy(5))
        held.fetched()
        assert (await leases.release(lease.handoff_id)).still_valid
        assert len((await collect(stream)).ids) == 4


async def test_reads_are_posted_by_threads_of_nixl_on_gpus_only(prefill: VllmEngine) -> None:
    """Posting the 2,016 reads of a prompt of 4,000 tokens one after the other holds the decode engine up."""
    extra = prefill.llm.vllm_config.kv_transfer_config.kv_connector_extra_config
    assert extra.get("num_threads") == (None if vllm.ON_GPU else 0)


async def test_a_release_frees_the_blocks_before_vllms_own_lease(prefill: VllmEngine) -> None:
    held = await prefill.prefill(PROMPT, greedy(5))
    assert prefill.load().blocks_held == 5
    assert await held.release() == 5
    # vLLM's own count, of a step that comes after: the canary's prompt is the only one.
    await collect(prefill.decode(Prompt((5,)), greedy(3)))
    await eventually(lambda: prefill.pool_usage() <= 1 / (vllm.BLOCKS - 1))


@pytest.mark.parametrize("sampling", [greedy(12), SAMPLED], ids=["greedy", "seeded"])
async def test_answers_over_two_engines_are_those_of_one(
    prefill: VllmEngine, decode: VllmEngine, sampling: Sampling
) -> None:
    lengths = [1, 5, 31, 32, 33, 63, 64, 65, 96, 128, 150, 200, 224]
    prompts = [Prompt(tuple((index * index + 13 * length) % 300 + 10 for index in range(length))) for length in lengths]
    whole = [(await collect(decode.decode(replace(one, cache_salt="one"), sampling))).ids[1:] for one in prompts]
    assert [await disaggregated(prefill, decode, one, sampling) for one in prompts] == whole
    crowd = await asyncio.gather(*(disaggregated(prefill, decode, one, sampling) for one in prompts[-8:]))
    assert list(crowd) == whole[-8:]


async def test_a_sampled_answer_is_handed_over_behind_emitted_tokens(prefill: VllmEngine, decode: VllmEngine) -> None:
    whole = (await collect(decode.decode(PROMPT, SAMPLED))).ids
    rest = await disaggregated(prefill, decode, replace(PROMPT, emitted=whole[:4]), SAMPLED)
    assert rest == whole[5:]


async def test_an_answer_that_the_kv_does_not_continue_is_lost(prefill: VllmEngine, decode: VllmEngine) -> None:
    whole = (await collect(decode.decode(PROMPT, greedy(3)))).ids
    held = await prefill.prefill(PROMPT, greedy(5))
    emitted = (whole[0], (whole[1] + 1) % 300)
    with pytest.raises(HandoffLost, match="other tokens"):
        await decode.decode_remote(
            RemoteKv(replace(PROMPT, emitted=emitted), held.num_tokens, held.engine_state), greedy(5)
        )
    await held.release()


async def test_an_id_outside_the_vocabulary_does_not_end_the_engine(prefill: VllmEngine) -> None:
    with pytest.raises(InvalidRequest):
        await prefill.prefill(Prompt((prefill.facts.vocab_size,)), greedy(2))
    assert prefill.healthy
    assert len((await collect(prefill.decode(PROMPT, greedy(2)))).ids) == 2


async def test_a_handoff_of_an_engine_that_is_not_there_is_lost(prefill: VllmEngine, decode: VllmEngine) -> None:
    held = await prefill.prefill(PROMPT, greedy(5))
    unknown = held.engine_state.replace(b"-", b"0", 1)
    source = RemoteKv(replace(PROMPT, emitted=(held.first_token,)), held.num_tokens, unknown)
    with pytest.raises((HandoffLost, InvalidRequest)):
        await decode.decode_remote(source, greedy(5))
    assert decode.healthy
    await held.release()


async def test_full_blocks_are_reported_in_batons_hash_chain(prefill: VllmEngine) -> None:
    prompt = Prompt(tuple(range(20, 90)), cache_salt="tenant")
    wanted, previous = set(), root_hash("tenant")
    for start in (0, 32):
        previous = block_hash(previous, prompt.token_ids[start : start + 32])
        wanted.add(previous)
    reported: set[bytes] = set()
    async with aclosing(prefill.kv_changes()) as changes:
        await anext(changes)
        await collect(prefill.decode(prompt, greedy(2)))
        async for change in changes:
            assert isinstance(change, KvChanged)
            reported.update(change.stored)
            if wanted <= reported:
                break


def _ask(max_tokens: int, first: int = 10, **fields: object) -> dict[str, object]:
    stopping = {"max_tokens": max_tokens, "ignore_eos": True}
    ids = {"ids": [(first * 7 + index * index) % 300 + 5 for index in range(60)]}
    return {"token_ids": ids, "sampling": {"temperature": 0.8, "seed": 7}, "stopping": stopping, **fields}


@pytest.mark.feature("prefill and decode on different workers", engine="vllm", facade="grpc")
@pytest.mark.feature("seeds", engine="vllm", facade="grpc")
@pytest.mark.feature("streaming", engine="vllm", facade="grpc")
@pytest.mark.feature("token ids as the prompt", engine="vllm", facade="grpc")
async def test_an_answer_over_two_workers_is_that_of_one(pair: Bench) -> None:
    apart = await pair.generate(**_ask(20))
    whole = await pair.generate(**_ask(20), routing={"topology": "TOPOLOGY_AGGREGATED"})
    assert apart.placed == ("p1", "d1")
    assert whole.placed == ("", "d1")
    assert apart.token_ids == whole.token_ids
    await eventually(lambda: pair.used_blocks() == 0)


async def test_a_handoff_of_a_worker_that_was_started_again_is_stale(pair: Bench) -> None:
    async with calls_to(pair.workers["p1"].address) as calls:
        handoff = await calls.prefill()
    await pair.stop("p1")
    again = await pair.start(lent_worker("p1", "prefill", vllm.LEASE_SECONDS))
    # The later process may even have the address of the earlier one.
    handoff.address = again.address
    async with calls_to(pair.workers["d1"].address) as calls:
        with pytest.raises(StaleEpoch):
            await calls.decode(decode_request(handoff))
    await eventually(lambda: pair.used_blocks() == 0)


@pytest.mark.feature("cancellation", engine="vllm", facade="grpc")
async def test_requests_that_clients_leave_harm_no_other(pair: Bench) -> None:
    whole = {
        n: (await pair.generate(**_ask(12, n), routing={"topology": "TOPOLOGY_AGGREGATED"})).token_ids for n in range(6)
    }

    async def leaving(number: int) -> None:
        task = asyncio.create_task(pair.generate(**_ask(60, number)))
        await asyncio.wait([task], timeout=0.02 * (number % 9))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def staying(number: int) -> bool:
        return (await pair.generate(**_ask(12, number % 6))).token_ids == whole[number % 6]

    for start in range(0, 40, 8):
        numbers = range(start, start + 8)
        jobs = [staying(number) if number % 2 else leaving(number) for number in numbers]
        assert False not in await asyncio.gather(*jobs)
    await eventually(lambda: pair.used_blocks() == 0)
