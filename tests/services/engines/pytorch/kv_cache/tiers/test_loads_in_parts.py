"""A load beside running streams: prepared, begun and ended in parts, of which no step has more than one."""

import random
import time
from collections.abc import Callable, Sequence

import pytest
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import greedy
from support.engines.tier_damage import damage_one, flipped_bit

from services.engines.kv_events import KvTier
from services.engines.prompt import Prompt
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.sequence import Event, Token, TokenSequence
from services.engines.pytorch.steps import scheduler, tier_loads

BLOCK_BYTES = 12288
OPTIONS = {
    "kv_cache_bytes": 40 * BLOCK_BYTES,
    "tiers": {"host_bytes": 400 * BLOCK_BYTES, "load_patience_seconds": 60},
    "max_sequences": 8,
}
PART = 2
Ids = Callable[[int, int], tuple[int, ...]]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_loads, "STEP_BLOCKS", PART)
    monkeypatch.setattr(scheduler, "STEP_BLOCKS", PART)
    monkeypatch.setattr(scheduler, "_NAMED_BLOCKS", PART)


class Run:
    """A core with a stream that runs, whose steps are watched."""

    def __init__(self, core: EngineCore, stream: tuple[int, ...]) -> None:
        self.core = core
        self.ids: dict[str, list[int]] = {}
        self.evicted: list[int] = []
        self.leaving: list[int] = []  # blocks, in the order in which their content leaves
        self.begun: list[int] = []
        self.looked_up: list[int] = []
        assert core.tiers is not None
        self.tiers = core.tiers
        evict, load = core._pool._evict, core.tiers.load

        def evicting(count: int) -> list[int]:
            self.evicted.append(count)
            blocks = evict(count)
            self.leaving += blocks
            return blocks

        def loading(*arguments: object) -> object:
            self.begun.append(len(arguments[0]))  # type: ignore[arg-type]
            return load(*arguments)  # type: ignore[arg-type]

        worth_loading = core.tiers.worth_loading

        def looking_up(hashes: Sequence[bytes]) -> int:
            self.looked_up.append(len(hashes))
            return worth_loading(hashes)

        core.tiers.worth_loading = looking_up  # type: ignore[method-assign]
        core._pool._evict = evicting  # type: ignore[method-assign]
        core.tiers.load = loading  # type: ignore[method-assign, assignment]
        self.stream = self.submit("stream", stream, 150)
        self.until(lambda: len(self.ids["stream"]) >= 2)
        self.evicted.clear()
        self.leaving.clear()
        self.looked_up.clear()

    def submit(self, name: str, prompt: tuple[int, ...], tokens: int = 4) -> TokenSequence:
        self.ids[name] = []

        def sink(event: Event) -> None:
            if isinstance(event, Token):
                self.ids[name].append(event.token_id)

        sequence = self.core.new_sequence(Prompt(prompt), greedy(tokens), sink, hold=False)
        self.core.submit(sequence)
        return sequence

    def until(self, is_so: Callable[[], bool]) -> None:
        late_at = time.monotonic() + 60
        while not is_so() and time.monotonic() < late_at:
            self.core.steps.step()
        assert is_so()

    def check_that_nothing_is_left(self) -> None:
        self.core.abort(self.stream)
        assert self.core._pool.used == 0
        assert not self.tiers.is_busy
        assert not self.tiers._expected


async def in_host_memory(engine: PyTorchEngine, prompts: list[tuple[int, ...]]) -> None:
    """Computes prompts, which then leave the pool."""

    def run(core: EngineCore) -> None:
        for prompt in prompts:
            ended: list[Event] = []
            core.submit(core.new_sequence(Prompt(prompt), greedy(4), ended.append, hold=False))
            while core.steps.step():
                pass
        core._pool.release(core._pool.allocate(core._pool.available))
        # Other content takes all blocks, so that what is loaded finds none that is empty.
        for number, block in enumerate(blocks := core._pool.allocate(core._pool.available)):
            core._pool.store(block, number.to_bytes(16, "big"))
        core._pool.release(blocks)

    await engine._loop.call(run)


async def test_no_step_beside_a_stream_has_more_than_a_part(llama: Checkpoint, random_ids: Ids) -> None:
    prompt, stream = random_ids(300, 1), random_ids(20, 2)

    def run(core: EngineCore) -> None:
        beside = Run(core, stream)
        loaded = beside.submit("loaded", prompt)
        beside.until(lambda: len(beside.ids["loaded"]) == 4)
        assert loaded.loaded_tokens == {KvTier.HOST: 288}
        assert beside.begun == [PART] * 9
        assert max(beside.evicted) <= PART
        assert beside.looked_up == [18]  # in one of all the steps that prepare it
        assert tuple(beside.ids["loaded"]) == llama.generate(prompt, 4)
        assert tuple(beside.ids["stream"]) == llama.generate(stream, 150)[: len(beside.ids["stream"])]
        beside.check_that_nothing_is_left()

    async with llama.engine(**OPTIONS) as engine:
        await in_host_memory(engine, [prompt])
        await engine._loop.call(run)


async def test_a_stream_that_grows_gets_the_block_that_has_left_first(llama: Checkpoint, random_ids: Ids) -> None:
    prompt, stream = random_ids(300, 1), random_ids(20, 2)

    def run(core: EngineCore) -> None:
        beside = Run(core, stream)
        loaded = beside.submit("loaded", prompt)
        beside.until(lambda: bool(loaded.blocks))
        taken, before = [beside.leaving.index(block) for block in loaded.blocks], len(beside.stream.blocks)
        assert len(taken) == 19
        beside.until(lambda: len(beside.stream.blocks) > before)
        # A step that writes into any other block would wait until that of a part of the load is copied.
        assert beside.leaving.index(beside.stream.blocks[-1]) < min(taken)
        beside.until(lambda: len(beside.ids["loaded"]) == 4)
        assert tuple(beside.ids["loaded"]) == llama.generate(prompt, 4)
        beside.check_that_nothing_is_left()

    async with llama.engine(**OPTIONS) as engine:
        await in_host_memory(engine, [prompt])
        await engine._loop.call(run)


@pytest.mark.parametrize("steps", range(2, 30, 3))
async def test_nothing_is_left_of_a_load_that_is_aborted_between_its_parts(
    llama: Checkpoint, random_ids: Ids, steps: int
) -> None:
    prompt, stream = random_ids(300, 1), random_ids(20, 2)

    def run(core: EngineCore) -> None:
        beside = Run(core, stream)
        aborted = beside.submit("aborted", prompt)
        for _ in range(steps):
            core.steps.step()
        core.abort(aborted)
        beside.submit("again", prompt)
        beside.until(lambda: len(beside.ids["again"]) == 4)
        assert tuple(beside.ids["again"]) == llama.generate(prompt, 4)
        beside.check_that_nothing_is_left()

    async with llama.engine(**OPTIONS) as engine:
        await in_host_memory(engine, [prompt])
        await engine._loop.call(run)


async def test_what_follows_a_damaged_part_is_computed(llama: Checkpoint, random_ids: Ids) -> None:
    prompt, stream, chance = random_ids(300, 1), random_ids(20, 2), random.Random(3)

    def run(core: EngineCore) -> None:
        beside = Run(core, stream)
        loaded = beside.submit("loaded", prompt)
        beside.until(lambda: len(beside.ids["loaded"]) == 4)
        assert loaded.loaded_tokens.get(KvTier.HOST, 0) < 288
        assert loaded.loaded_blocks == 0  # which says nothing of how long a load takes
        assert tuple(beside.ids["loaded"]) == llama.generate(prompt, 4)
        beside.check_that_nothing_is_left()

    async with llama.engine(**OPTIONS) as engine:
        await in_host_memory(engine, [prompt])
        for _ in range(12):
            assert await damage_one(engine, KvTier.HOST, flipped_bit, chance)
        await engine._loop.call(run)


async def test_a_second_request_waits_for_all_parts_of_the_first_one(llama: Checkpoint, random_ids: Ids) -> None:
    prompt, stream = random_ids(300, 1), random_ids(20, 2)

    def run(core: EngineCore) -> None:
        beside = Run(core, stream)
        both = [beside.submit(name, prompt) for name in ("first", "second")]
        beside.until(lambda: len(beside.ids["first"]) == len(beside.ids["second"]) == 4)
        assert [each.cached_tokens for each in both] == [288, 288]
        assert sum(beside.begun) == 18
        assert beside.ids["first"] == beside.ids["second"]
        beside.check_that_nothing_is_left()

    async with llama.engine(**OPTIONS) as engine:
        await in_host_memory(engine, [prompt])
        await engine._loop.call(run)
