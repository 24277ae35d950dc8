"""Loads beside evictions, preemptions and blocks that come from elsewhere meanwhile."""

import random
import time
from collections.abc import Callable

import pytest
import torch
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import collect, greedy

from services.engines.kv_events import KvTier
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.kv_cache.events import BlockMoved, BlockRemoved
from services.engines.pytorch.kv_cache.tiers.tiers import KvTiers
from services.engines.pytorch.sequence import Event, Token, TokenSequence
from services.engines.seals import BlockContents

BLOCK_BYTES = 12288
POOL = 24 * BLOCK_BYTES
NAMES = [number.to_bytes(16, "big") for number in range(4)]
Ids = Callable[[int, int], tuple[int, ...]]


@pytest.mark.parametrize("host_blocks", [6, 14, 24])
async def test_blocks_to_load_may_leave_for_those_that_the_load_evicts(
    llama: Checkpoint, random_ids: Ids, host_blocks: int
) -> None:
    chance = random.Random(host_blocks)
    prompts = [random_ids(length, length) for length in (200, 150, 90, 250)]
    right = [llama.generate(prompt, 4) for prompt in prompts]
    async with llama.engine(kv_cache_bytes=POOL, tiers={"host_bytes": host_blocks * BLOCK_BYTES}) as engine:
        for _ in range(30):
            number = chance.randrange(len(prompts))
            found = await collect(engine.decode(Prompt(prompts[number]), greedy(4)))
            assert found.ids == right[number]


@pytest.mark.parametrize("is_reported", [False, True])
async def test_an_unfinished_block_is_loaded_only_after_the_blocks_that_it_followed(
    llama: Checkpoint, random_ids: Ids, *, is_reported: bool
) -> None:
    """Preempted amid its prompt, of which another sequence then computes all, or of which all must be reported on."""
    prompt = random_ids(100, 1)
    reported = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=1 if is_reported else None)
    ids: dict[str, list[int]] = {"first": [], "other": []}

    def sequence(core: EngineCore, name: str, sampling: Sampling) -> TokenSequence:
        def sink(event: Event) -> None:
            if isinstance(event, Token):
                ids[name].append(event.token_id)

        return core.new_sequence(Prompt(prompt), sampling, sink, hold=False)

    def run(core: EngineCore) -> None:
        first = sequence(core, "first", reported)
        core.submit(first)
        core.steps.step()
        core.steps.finish_step()
        assert first.computed == 40
        core.scheduler._preempt(first)
        core.scheduler.waiting.remove(first)
        if not is_reported:
            core.submit(sequence(core, "other", greedy(8)))
            while len(ids["other"]) < 8:
                core.steps.step()
        core.scheduler.waiting.appendleft(first)
        late_at = time.monotonic() + 20
        while len(ids["first"]) < 8 and time.monotonic() < late_at:
            core.steps.step()

    async with llama.engine(
        kv_cache_bytes=POOL, tiers={"host_bytes": 400 * BLOCK_BYTES}, max_sequences=8, max_step_tokens=40
    ) as engine:
        await engine._loop.call(run)
    assert tuple(ids["first"]) == llama.generate(prompt, 8)


async def tiers_and_events(llama: Checkpoint, run: Callable[[KvTiers, list[object]], None]) -> None:
    """Runs something on the tiers of an engine, with what they report."""
    heard: list[object] = []

    def call(core: EngineCore) -> None:
        tiers = core.tiers
        assert tiers is not None
        tiers._listener = tiers.directory._listener = heard.append
        with torch.inference_mode():
            run(tiers, heard)

    async with llama.engine(kv_cache_bytes=POOL, tiers={"host_bytes": 2 * BLOCK_BYTES}) as engine:
        await engine._loop.call(call)


@pytest.mark.parametrize("is_aborted", [False, True])
async def test_a_block_that_the_pool_got_during_its_load_is_not_put_back(
    llama: Checkpoint, *, is_aborted: bool
) -> None:
    def run(tiers: KvTiers, heard: list[object]) -> None:
        assert not tiers.demote([(1, NAMES[0])])
        tiers.settle([1])
        load = tiers.load([BlockContents(NAMES[0], 15)], [2])  # of another length: it is damaged
        tiers.stored(NAMES[0])
        if is_aborted:
            tiers.give_back(load)
        else:
            assert tiers._movers.loads.wait([load], 10)
            assert not tiers.finish(load)
        assert heard == [BlockMoved(NAMES[0], KvTier.HOST)]
        assert tiers.directory.used(KvTier.HOST) == 0
        assert len(tiers.directory._host.free) == 2

    await tiers_and_events(llama, run)


async def test_a_block_is_reported_as_gone_whose_tier_was_closed_during_its_load(llama: Checkpoint) -> None:
    def run(tiers: KvTiers, heard: list[object]) -> None:
        assert not tiers.demote([(1, NAMES[0])])
        load = tiers.load([BlockContents(NAMES[0], 16)], [2])
        tiers.directory.close(KvTier.HOST)
        tiers.give_back(load)
        assert heard == [BlockMoved(NAMES[0], KvTier.HOST), BlockRemoved(NAMES[0])]

    await tiers_and_events(llama, run)


async def test_nothing_is_counted_any_more_of_a_load_that_was_cancelled(llama: Checkpoint) -> None:
    def run(tiers: KvTiers, heard: list[object]) -> None:
        del heard
        assert not tiers.demote([(1, NAMES[0])])
        tiers.settle([1])
        contents = BlockContents(NAMES[0], 16)
        load = tiers.load([contents], [2])
        assert tiers._movers.loads.wait([load], 10)
        tiers._movers.cancel(load)
        [item], [seal] = load.items, [tiers.host.seal(load.items[0].place.slot)]
        assert not tiers._movers._check(load, [item], [seal], [0])
        assert (load.checked, load.is_damaged) == (1, False)

    await tiers_and_events(llama, run)


async def test_a_block_of_two_loads_is_still_loaded_when_one_of_them_has_ended(llama: Checkpoint) -> None:
    """It left the pool again during the first load, and then came back during the second."""

    def run(tiers: KvTiers, heard: list[object]) -> None:
        contents = [BlockContents(NAMES[0], 16)]
        assert not tiers.demote([(1, NAMES[0])])
        first = tiers.load(contents, [2])
        assert not tiers.demote([(3, NAMES[0])])
        second = tiers.load(contents, [4])
        tiers.give_back(first)
        assert tiers.is_loading(NAMES[0])
        assert tiers.is_busy
        tiers.stored(NAMES[0])
        reported = len(heard)
        tiers.give_back(second)
        assert heard[reported:] == []
        assert tiers.directory.used(KvTier.HOST) == 0
        assert not tiers.is_busy

    await tiers_and_events(llama, run)
