"""A damaged block is never used: it counts as missing, and the ids are those without any cache."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path

import pytest
from support.clients.scraping import sample, since
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import collect, greedy
from support.engines.tier_damage import BLOCK_BYTES, DAMAGES, SLOT_BYTES, Damage, damage_one, flipped_bit
from support.engines.tier_faults import STEPS, failing_now_and_then, files_of_at_most
from support.engines.tier_loads import always_loaded
from support.sampled import sampled

from services.engines.kv_events import KvTier
from services.engines.prompt import Prompt
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.kv_cache.tiers import tiers as tiers_module

__all__ = ["always_loaded"]

POOL = 20 * BLOCK_BYTES
TOKENS = 4
_TIERS = (KvTier.HOST, KvTier.DISK)
_PARTS = 8  # of the ten thousand, each in a test of its own
ON_HOST = {"kv_cache_bytes": POOL, "tiers": {"host_bytes": 200 * BLOCK_BYTES, "load_patience_seconds": 60}}
Ids = Callable[[int, int], tuple[int, ...]]


def on_disk(path: Path, host_blocks: int = 14) -> dict[str, object]:
    disk = {"path": path, "bytes": 300 * SLOT_BYTES}
    tiers = {"host_bytes": host_blocks * BLOCK_BYTES, "load_patience_seconds": 60, "disk": disk}
    return {"kv_cache_bytes": POOL, "tiers": tiers}


@pytest.fixture
def never_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier stays in use however often it fails."""
    monkeypatch.setattr(tiers_module, "_MOST_FAILURES", 1 << 60)


@pytest.fixture
def prompts(random_ids: Ids) -> list[tuple[int, ...]]:
    return [random_ids(200, seed) for seed in range(8)]


def _name(case: tuple[Damage, KvTier]) -> str:
    return f"{case[0].__name__}-{case[1].name}"


async def ids_of(engine: PyTorchEngine, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return (await collect(engine.decode(Prompt(prompt), greedy(TOKENS)))).ids


async def damaged_reads(
    llama: Checkpoint,
    prompts: Sequence[tuple[int, ...]],
    options: Mapping[str, object],
    counts: Mapping[KvTier, int],
    seed: int = 0,
) -> tuple[dict[KvTier, int], int]:
    """Asks for prompts until so many damaged blocks were read of each tier; returns how many, and the wrong answers."""
    chance, wrong, turn = random.Random(32 + seed), 0, 0
    found = {tier: since("baton_kv_damaged_blocks_total", tier=tier.name.lower()) for tier in counts}
    async with llama.engine(**options) as engine:
        right = [llama.generate(prompt, TOKENS) for prompt in prompts]
        while any(found[tier].grown < count for tier, count in counts.items()):
            for tier in counts:
                for damage in DAMAGES:
                    await damage_one(engine, tier, damage, chance)
            turn = (turn + 1) % len(prompts)
            wrong += await ids_of(engine, prompts[turn]) != right[turn]
    return {tier: int(each.grown) for tier, each in found.items()}, wrong


@pytest.mark.usefixtures("never_closed")
async def test_of_a_hundred_damaged_reads_none_gives_a_wrong_token(
    llama: Checkpoint, prompts: list[tuple[int, ...]]
) -> None:
    read, wrong = await damaged_reads(llama, prompts, ON_HOST, {KvTier.HOST: 100})
    assert (read[KvTier.HOST] >= 100, wrong) == (True, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.usefixtures("never_closed", "always_loaded")
async def test_of_ten_thousand_damaged_reads_none_gives_a_wrong_token(
    llama: Checkpoint, prompts: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """Half of host memory, and half of a disk that is full amid a block, while one operation in a thousand fails."""
    failures = failing_now_and_then(monkeypatch, STEPS, share=0.001, seed=part)
    each = 10_000 // _PARTS // 2
    of_host, wrong = await damaged_reads(llama, prompts, ON_HOST, {KvTier.HOST: each}, part)
    with files_of_at_most(60 * SLOT_BYTES + 4096):
        of_disk, wrong_too = await damaged_reads(llama, prompts, on_disk(tmp_path / "kv"), {KvTier.DISK: each}, part)
    print(f"{of_host[KvTier.HOST]} damaged reads of host memory, {of_disk[KvTier.DISK]} of the disk")
    print(f"beside {failures.total()} failed operations ({_shown(failures)}): {wrong + wrong_too} wrong answers")
    assert of_host[KvTier.HOST] >= each
    assert of_disk[KvTier.DISK] >= each
    assert wrong + wrong_too == 0


def _shown(failures: Counter[str]) -> str:
    return ", ".join(f"{count} of {name}" for name, count in sorted(failures.items()))


@pytest.mark.parametrize("case", sampled(product(DAMAGES, _TIERS), zip(DAMAGES, cycle(_TIERS), strict=False), _name))
@pytest.mark.usefixtures("never_closed")
async def test_each_kind_of_damage_is_found(
    llama: Checkpoint, prompts: list[tuple[int, ...]], tmp_path: Path, case: tuple[Damage, KvTier]
) -> None:
    damage, tier = case
    chance = random.Random(7)
    found = since("baton_kv_damaged_blocks_total", tier=tier.name.lower())
    async with llama.engine(**(ON_HOST if tier is KvTier.HOST else on_disk(tmp_path / "kv"))) as engine:
        right = [await ids_of(engine, prompt) for prompt in prompts]
        for _ in range(3):
            for _ in range(30):
                await damage_one(engine, tier, damage, chance)
            assert [await ids_of(engine, prompt) for prompt in prompts] == right
    assert found.grown > 0


async def test_a_third_damaged_block_in_a_minute_takes_the_tier_out_of_use(
    llama: Checkpoint, prompts: list[tuple[int, ...]]
) -> None:
    chance = random.Random(7)
    found = since("baton_kv_damaged_blocks_total", tier="host")
    async with llama.engine(**ON_HOST) as engine:
        right = [await ids_of(engine, prompt) for prompt in prompts]
        while await damage_one(engine, KvTier.HOST, flipped_bit, chance):
            for prompt, ids in zip(prompts, right, strict=True):
                assert await ids_of(engine, prompt) == ids
        assert found.grown == 3
        assert sample("baton_kv_tier_capacity_blocks", tier="host") == 0
        loaded = since("baton_kv_tier_hit_tokens_total", tier="host")
        assert [await ids_of(engine, prompt) for prompt in prompts] == right
        assert loaded.grown == 0


def _file(core: EngineCore) -> Path:
    """The tier's file, which has no name."""
    assert core.tiers is not None
    assert core.tiers.disk is not None
    return Path(f"/proc/self/fd/{core.tiers.disk._file}")


async def test_what_a_killed_worker_left_in_the_file_is_not_read(
    llama: Checkpoint, prompts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "kv"
    left: list[bytes] = []
    async with llama.engine(**on_disk(path)) as engine:
        right = [await ids_of(engine, prompt) for prompt in prompts]
        await engine._loop.call(lambda core: left.append(_file(core).read_bytes()))
    loaded = since("baton_kv_tier_hit_tokens_total", tier="disk")
    async with llama.engine(**on_disk(path)) as engine:
        await engine._loop.call(lambda core: _file(core).write_bytes(left[0]))  # even if it were there
        assert [await ids_of(engine, prompt) for prompt in prompts] == right
    assert loaded.grown == 0
