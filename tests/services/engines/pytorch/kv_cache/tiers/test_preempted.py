"""Prompts whose KV has left the pool are loaded again from a tier, and answered with the same ids."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.clients.scraping import since
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import blocks_used, collect, disaggregated, greedy
from support.engines.tier_loads import always_loaded

from baton.errors import ConfigError
from services.engines.kv_events import KvSnapshot, KvStored
from services.engines.prompt import Prompt
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.kv_cache.blocks import HashChain

BLOCK_BYTES = 12288
POOL = 24 * BLOCK_BYTES
Ids = Callable[[int, int], tuple[int, ...]]
HOST = {"kv_cache_bytes": POOL, "tiers": {"host_bytes": 400 * BLOCK_BYTES, "load_patience_seconds": 60}}

__all__ = ["always_loaded"]

pytestmark = pytest.mark.usefixtures("always_loaded")


async def answer(engine: PyTorchEngine, prompt: tuple[int, ...], tokens: int = 8) -> tuple[tuple[int, ...], int]:
    generated = await collect(engine.decode(Prompt(prompt), replace(greedy(tokens), ignore_eos=False)))
    return generated.ids, generated.finished.cached_tokens


async def test_a_prompt_that_has_left_the_pool_comes_back_from_host_memory(llama: Checkpoint, random_ids: Ids) -> None:
    prompts = [random_ids(200, seed) for seed in range(6)]
    async with llama.engine(**HOST) as engine:
        first = [await answer(engine, prompt) for prompt in prompts]
        again = [await answer(engine, prompt) for prompt in prompts]
    assert [ids for ids, _ in again] == [ids for ids, _ in first] == [llama.generate(p, 8) for p in prompts]
    assert [cached for _, cached in again] == [192] * len(prompts)


async def test_prompts_that_come_back_at_once_beside_new_ones_are_answered_alike(
    checkpoint: Checkpoint, random_ids: Ids
) -> None:
    prompts = [random_ids(100 + 10 * seed, seed) for seed in range(10)]
    options = {**HOST, "kv_cache_bytes": 2 << 20}
    async with checkpoint.engine(**options) as engine:
        for prompt in prompts[:7]:
            await answer(engine, prompt)
        found = await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))
        assert blocks_used(engine) == 0
    assert [ids for ids, _ in found] == [checkpoint.generate(prompt, 8) for prompt in prompts]


async def test_a_prompt_comes_back_from_the_disk(llama: Checkpoint, random_ids: Ids, tmp_path: Path) -> None:
    prompts = [random_ids(200, seed) for seed in range(8)]
    disk = {"path": tmp_path / "kv", "bytes": 300 * (BLOCK_BYTES + 4096)}
    options = {
        "kv_cache_bytes": POOL,
        "tiers": {"host_bytes": 20 * BLOCK_BYTES, "load_patience_seconds": 60, "disk": disk},
    }
    async with llama.engine(**options) as engine:
        loaded = since("baton_kv_tier_hit_tokens_total", tier="disk")
        first = [await answer(engine, prompt) for prompt in prompts]
        again = [await answer(engine, prompt) for prompt in prompts]
    assert loaded.grown > 0
    assert [ids for ids, _ in again] == [ids for ids, _ in first] == [llama.generate(p, 8) for p in prompts]
    assert not (tmp_path / "kv").exists()


async def test_the_load_says_what_is_in_each_tier_and_where_tokens_were_found(
    llama: Checkpoint, random_ids: Ids
) -> None:
    prompts = [random_ids(200, seed) for seed in range(4)]
    async with llama.engine(**HOST) as engine:
        for prompt in (*prompts, prompts[0], prompts[0]):
            await answer(engine, prompt)
        memory = engine.load().memory
    assert memory is not None
    assert (memory.host_total, memory.disk_total, memory.prompt_tokens) == (400, 0, 6 * 200)
    assert memory.host_used >= 2 * 12
    assert (memory.host_tokens, memory.device_tokens) == (192, 192)


async def test_requests_for_one_prefix_load_it_once(llama: Checkpoint, random_ids: Ids) -> None:
    prompt, others = random_ids(200, 1), [random_ids(200, seed) for seed in range(2, 6)]
    async with llama.engine(**HOST) as engine:
        await answer(engine, prompt)
        for other in others:
            await answer(engine, other)
        loaded = since("baton_kv_tier_hit_tokens_total", tier="host")
        found = await asyncio.gather(*(answer(engine, prompt) for _ in range(4)))
    assert loaded.grown == 192
    assert {cached for _, cached in found} == {192}


async def test_a_preempted_sequence_resumes_with_nothing_computed_twice(llama: Checkpoint, random_ids: Ids) -> None:
    prompts = [random_ids(100, seed) for seed in range(3)]
    async with llama.engine(**HOST) as engine:
        computed = 0
        start = engine.runner.start

        def counting(chunks):  # type: ignore[no-untyped-def]
            nonlocal computed
            computed += sum(chunk.count for chunk in chunks)
            return start(chunks)

        engine.runner.start = counting  # type: ignore[method-assign]
        preempted = since("baton_preemptions_total")
        found = await asyncio.gather(*(answer(engine, prompt, 60) for prompt in prompts))
    assert preempted.grown > 0
    assert [ids for ids, _ in found] == [llama.generate(prompt, 60) for prompt in prompts]
    assert computed == 3 * (100 + 60 - 1)


async def test_the_unfinished_block_of_a_preempted_answer_is_not_told_of_for_ever(
    llama: Checkpoint, random_ids: Ids
) -> None:
    prompts = [random_ids(100 + 5 * seed, seed) for seed in range(3)]
    async with llama.engine(**HOST) as engine:
        preempted = since("baton_preemptions_total")
        found = await asyncio.gather(*(answer(engine, prompt, 60) for prompt in prompts))
        async with aclosing(engine.kv_changes()) as changes:
            pool, host = await anext(changes), await anext(changes)
    assert preempted.grown > 0
    chains = [(*prompt, *ids) for prompt, (ids, _) in zip(prompts, found, strict=True)]
    names = {name for chain in chains for name in HashChain("", 16).upto(chain, len(chain))}
    assert isinstance(pool, KvSnapshot)
    assert isinstance(host, KvStored)
    assert {*pool.block_hashes, *host.block_hashes} <= names


async def test_a_cancelled_load_gives_its_blocks_back(llama: Checkpoint, random_ids: Ids) -> None:
    prompts = [random_ids(200, seed) for seed in range(6)]
    async with llama.engine(**HOST) as engine:
        for prompt in prompts:
            await answer(engine, prompt)
        for _ in range(20):
            task = asyncio.create_task(answer(engine, prompts[0]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert blocks_used(engine) == 0
        assert await answer(engine, prompts[0]) == (llama.generate(prompts[0], 8), 192)


async def test_blocks_handed_over_into_a_pool_that_evicts_others_are_right(llama: Checkpoint, random_ids: Ids) -> None:
    prompts = [random_ids(200, seed) for seed in range(6)]
    async with llama.engine() as prefill, llama.engine(**HOST) as decode:
        for prompt in prompts:
            generated = await disaggregated(prefill, decode, Prompt(prompt), greedy(8))
            assert generated == llama.generate(prompt, 8)[1:]
        for prompt in prompts:
            assert (await answer(decode, prompt))[0] == llama.generate(prompt, 8)


def test_tiers_without_a_prefix_cache_are_refused(llama: Checkpoint) -> None:
    with pytest.raises(ValidationError, match="tiers: prefix_cache must not be false"):
        llama.config(tiers={}, prefix_cache=False)


def test_tiers_of_a_split_model_are_refused(llama: Checkpoint) -> None:
    with pytest.raises(ValidationError, match="does not support tiers"):
        llama.config(tiers={}, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("disk", "message"),
    [
        ({"path": "/nowhere/kv", "bytes": 1 << 20}, "engine.tiers.disk.path: /nowhere/kv: No such file or directory"),
        ({"path": "kv", "bytes": 100}, "engine.tiers.disk.bytes: less than one block"),
    ],
)
async def test_a_disk_that_cannot_be_used_is_refused_at_start(
    llama: Checkpoint, disk: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        async with llama.engine(tiers={"disk": disk}):
            pass
