"""A damaged block is never used: it counts as missing, and the ids are those without any cache."""

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.clients.scraping import sample, since
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import collect, greedy

from services.engines.kv_events import KvTier
from services.engines.prompt import Prompt
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.kv_cache.tiers import tiers as tiers_module
from services.engines.pytorch.kv_cache.tiers.host import Copier
from services.engines.pytorch.kv_cache.tiers.tiers import KvTiers
from services.engines.seals import SEAL_BYTES, BlockContents, Sealer

BLOCK_BYTES = 12288
SLOT_BYTES = BLOCK_BYTES + 4096
POOL = 20 * BLOCK_BYTES
TOKENS = 4
Ids = Callable[[int, int], tuple[int, ...]]
Damage = Callable[[KvTiers, int, random.Random], None]


def _flip(memory: memoryview, chance: random.Random) -> None:
    position = chance.randrange(len(memory))
    memory[position] ^= 1 << chance.randrange(8)


def flipped_bit(tiers: KvTiers, slot: int, chance: random.Random) -> None:
    _flip(_bytes(tiers, slot), chance)


def torn_write(tiers: KvTiers, slot: int, chance: random.Random) -> None:
    """The rest of a block is that of the slot's earlier block."""
    block = _bytes(tiers, slot)
    rest = chance.randrange(0, len(block), 64)
    block[rest:] = bytes(chance.randrange(1, 256) for _ in range(64)) * ((len(block) - rest) // 64)


def killed_writer(tiers: KvTiers, slot: int, chance: random.Random) -> None:
    """The data are there, and the seal, which is written last, is not."""
    del chance
    tiers.host.set_seal(slot, b"")


def damaged_seal(tiers: KvTiers, slot: int, chance: random.Random) -> None:
    seal = bytearray(tiers.host.seal(slot))
    _flip(memoryview(seal), chance)
    tiers.host.set_seal(slot, bytes(seal))


def stale_epoch(tiers: KvTiers, slot: int, chance: random.Random) -> None:
    """A seal of an earlier process, right in everything else."""
    sealer = Sealer(tiers._layout, chance.getrandbits(64))
    tiers.host.set_seal(slot, sealer.seal(_contents(tiers, slot), _digest(tiers, slot)))


def wrong_layout(tiers: KvTiers, slot: int, chance: random.Random) -> None:
    """A seal of another model, right in everything else."""
    del chance
    sealer = Sealer(tiers._layout, tiers.sealer._epoch)
    sealer._layout = bytes(8)
    tiers.host.set_seal(slot, sealer.seal(_contents(tiers, slot), _digest(tiers, slot)))


def another_block(tiers: KvTiers, slot: int, chance: random.Random) -> None:
    """A block, with its seal, in the place of another one."""
    others = [each for each in tiers.directory._host.slot_of.values() if each != slot]
    other = chance.choice(others)
    _bytes(tiers, slot)[:] = _bytes(tiers, other)
    tiers.host.set_seal(slot, tiers.host.seal(other))


DAMAGES: Sequence[Damage] = [
    *(flipped_bit, torn_write, killed_writer, damaged_seal, stale_epoch, wrong_layout, another_block)
]


def _bytes(tiers: KvTiers, slot: int) -> memoryview:
    return tiers.host.memory.read([slot])[0]


def _contents(tiers: KvTiers, slot: int) -> BlockContents:
    [block_hash] = [each for each, found in tiers.directory._host.slot_of.items() if found == slot]
    return BlockContents(block_hash, 16)


def _digest(tiers: KvTiers, slot: int) -> int:
    return int.from_bytes(tiers.host.seal(slot)[40:48], "little")


@pytest.fixture
def never_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier stays in use however often it fails."""
    monkeypatch.setattr(tiers_module, "_MOST_FAILURES", 1 << 60)


async def ids_of(engine: PyTorchEngine, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return (await collect(engine.decode(Prompt(prompt), greedy(TOKENS)))).ids


async def damage_one(engine: PyTorchEngine, damage: Damage, chance: random.Random) -> bool:
    """Damages a block in host memory, between two steps; False if there is none."""

    def run(core: EngineCore) -> bool:
        tiers = core.tiers
        assert tiers is not None
        tiers.settle(range(1000))
        tiers.poll()
        slots = list(tiers.directory._host.slot_of.values())
        if slots:
            damage(tiers, chance.choice(slots), chance)
        return bool(slots)

    return await engine._loop.call(run)


async def damaged_reads(llama: Checkpoint, prompts: Sequence[tuple[int, ...]], count: int) -> tuple[int, int]:
    """Asks for prompts until `count` damaged blocks were read; returns that, and how many answers were wrong."""
    chance, wrong, turn = random.Random(32), 0, 0
    found = since("baton_kv_damaged_blocks_total", tier="host")
    tiers = {"host_bytes": 200 * BLOCK_BYTES, "load_patience_seconds": 60}
    async with llama.engine(kv_cache_bytes=POOL, tiers=tiers) as engine:
        right = [await ids_of(engine, prompt) for prompt in prompts]
        while found.grown < count:
            for damage in DAMAGES:
                await damage_one(engine, damage, chance)
            turn = (turn + 1) % len(prompts)
            wrong += await ids_of(engine, prompts[turn]) != right[turn]
    return int(found.grown), wrong


@pytest.fixture
def prompts(random_ids: Ids) -> list[tuple[int, ...]]:
    return [random_ids(200, seed) for seed in range(8)]


@pytest.mark.usefixtures("never_closed")
async def test_of_a_hundred_damaged_reads_none_gives_a_wrong_token(
    llama: Checkpoint, prompts: list[tuple[int, ...]]
) -> None:
    read, wrong = await damaged_reads(llama, prompts, 100)
    assert (read >= 100, wrong) == (True, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("never_closed")
async def test_of_ten_thousand_damaged_reads_none_gives_a_wrong_token(
    llama: Checkpoint, prompts: list[tuple[int, ...]]
) -> None:
    read, wrong = await damaged_reads(llama, prompts, 10_000)
    print(f"{read} damaged reads, {wrong} wrong answers")
    assert (read >= 10_000, wrong) == (True, 0)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.usefixtures("never_closed")
async def test_each_kind_of_damage_is_found(llama: Checkpoint, prompts: list[tuple[int, ...]], damage: Damage) -> None:
    chance = random.Random(7)
    found = since("baton_kv_damaged_blocks_total", tier="host")
    async with llama.engine(kv_cache_bytes=POOL, tiers={"host_bytes": 200 * BLOCK_BYTES}) as engine:
        right = [await ids_of(engine, prompt) for prompt in prompts]
        for _ in range(30):
            await damage_one(engine, damage, chance)
        assert [await ids_of(engine, prompt) for prompt in prompts] == right
    assert found.grown > 0


async def test_a_third_damaged_block_in_a_minute_takes_the_tier_out_of_use(
    llama: Checkpoint, prompts: list[tuple[int, ...]]
) -> None:
    chance = random.Random(7)
    found = since("baton_kv_damaged_blocks_total", tier="host")
    async with llama.engine(kv_cache_bytes=POOL, tiers={"host_bytes": 200 * BLOCK_BYTES}) as engine:
        right = [await ids_of(engine, prompt) for prompt in prompts]
        while await damage_one(engine, flipped_bit, chance):
            for prompt, ids in zip(prompts, right, strict=True):
                assert await ids_of(engine, prompt) == ids
        assert found.grown == 3
        assert sample("baton_kv_tier_capacity_blocks", tier="host") == 0
        loaded = since("baton_kv_tier_hit_tokens_total", tier="host")
        assert [await ids_of(engine, prompt) for prompt in prompts] == right
        assert loaded.grown == 0


def on_disk(path: Path) -> dict[str, object]:
    disk = {"path": path, "bytes": 300 * SLOT_BYTES}
    return {"kv_cache_bytes": POOL, "tiers": {"host_bytes": 14 * BLOCK_BYTES, "disk": disk}}


@pytest.mark.parametrize("kind", ["flipped", "torn", "zeros", "seal"])
@pytest.mark.usefixtures("never_closed")
async def test_damage_on_the_disk_is_found(
    llama: Checkpoint, prompts: list[tuple[int, ...]], tmp_path: Path, kind: str
) -> None:
    chance, path = random.Random(7), tmp_path / "kv"
    found = since("baton_kv_damaged_blocks_total", tier="disk")
    async with llama.engine(**on_disk(path)) as engine:
        right = [await ids_of(engine, prompt) for prompt in prompts]
        for _ in range(3):
            _damage_file(path, kind, chance)
            assert [await ids_of(engine, prompt) for prompt in prompts] == right
    assert found.grown > 0


def _damage_file(path: Path, kind: str, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for slot in range(0, len(content), SLOT_BYTES):
        place = slot + chance.randrange(BLOCK_BYTES)
        match kind:
            case "flipped":
                content[place] ^= 1 << chance.randrange(8)
            case "torn":
                content[place : slot + BLOCK_BYTES] = os.urandom(slot + BLOCK_BYTES - place)
            case "zeros":
                content[slot : slot + SLOT_BYTES] = bytes(SLOT_BYTES)
            case "seal":
                content[slot + BLOCK_BYTES + chance.randrange(SEAL_BYTES)] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


async def test_what_a_killed_worker_left_in_the_file_is_not_read(
    llama: Checkpoint, prompts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "kv"
    async with llama.engine(**on_disk(path)) as engine:
        right = [await ids_of(engine, prompt) for prompt in prompts]
        left = path.read_bytes()
    path.write_bytes(left)
    loaded = since("baton_kv_tier_hit_tokens_total", tier="disk")
    async with llama.engine(**on_disk(path)) as engine:
        path.write_bytes(left)  # even if it were there
        assert [await ids_of(engine, prompt) for prompt in prompts] == right
    assert loaded.grown == 0


async def test_a_full_disk_is_taken_out_of_use_and_the_answers_stay_right(
    llama: Checkpoint, prompts: list[tuple[int, ...]]
) -> None:
    failed = since("baton_kv_tier_failures_total", tier="disk")
    async with llama.engine(**on_disk(Path("/dev/full"))) as engine:
        right = [await ids_of(engine, prompt) for prompt in prompts]
        assert [await ids_of(engine, prompt) for prompt in prompts] == right
        assert sample("baton_kv_tier_capacity_blocks", tier="disk") == 0
    assert failed.grown >= 3


async def test_a_load_that_is_late_is_computed(
    llama: Checkpoint, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_in = Copier.copy_in

    def slowly(self: Copier, row: torch.Tensor, block: int) -> None:
        time.sleep(0.01)
        copy_in(self, row, block)

    monkeypatch.setattr(Copier, "copy_in", slowly)
    late = since("baton_kv_failed_loads_total", reason="late")
    tiers = {"host_bytes": 200 * BLOCK_BYTES, "load_patience_seconds": 0.001}
    async with llama.engine(kv_cache_bytes=POOL, tiers=tiers) as engine:
        right = [await ids_of(engine, prompt) for prompt in prompts]
        for _ in range(2):
            assert [await ids_of(engine, prompt) for prompt in prompts] == right

        def tier_is_open(core: EngineCore) -> bool:
            assert core.tiers is not None
            return core.tiers.directory.total(KvTier.HOST) > 0

        assert await engine._loop.call(tier_is_open)
    assert late.grown > 0


@pytest.mark.parametrize("copy", ["copy_out", "copy_in"])
async def test_copies_that_fail_cost_no_token_and_three_take_the_tier_out(
    llama: Checkpoint, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, copy: str
) -> None:
    chance, plain = random.Random(5), getattr(Copier, copy)

    def failing(self: Copier, *arguments: object) -> None:
        plain(self, *arguments)
        if chance.random() < 0.1:
            raise RuntimeError("the link is down")

    monkeypatch.setattr(Copier, copy, failing)
    failed = since("baton_kv_tier_failures_total", tier="host")
    async with llama.engine(kv_cache_bytes=POOL, tiers={"host_bytes": 200 * BLOCK_BYTES}) as engine:
        right = [await ids_of(engine, prompt) for prompt in prompts]
        for _ in range(4):
            assert [await ids_of(engine, prompt) for prompt in prompts] == right
        assert sample("baton_kv_tier_capacity_blocks", tier="host") == 0
    assert failed.grown >= 3
    assert right == [llama.generate(prompt, TOKENS) for prompt in prompts]
