"""A device, a link or a disk that fails amid a demotion, a spill or a load costs time, and never a token."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.clients.scraping import sample, since
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import collect, greedy
from support.engines.tier_damage import BLOCK_BYTES, SLOT_BYTES, settle
from support.engines.tier_faults import STEPS, Step, failing_now_and_then, files_of_at_most
from support.sampled import sampled

from services.engines.kv_events import KvTier
from services.engines.prompt import Prompt
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.kv_cache.tiers import tiers as tiers_module
from services.engines.pytorch.kv_cache.tiers.disk import DiskFile
from services.engines.pytorch.kv_cache.tiers.host import Copier
from services.engines.pytorch.kv_cache.tiers.tiers import KvTiers
from services.engines.seals import BlockContents

POOL = 20 * BLOCK_BYTES
TOKENS = 4
NAMES = [number.to_bytes(16, "big") for number in range(8)]
Ids = Callable[[int, int], tuple[int, ...]]


def on_disk(path: Path, host_blocks: int = 14) -> dict[str, object]:
    disk = {"path": path, "bytes": 300 * SLOT_BYTES}
    return {"kv_cache_bytes": POOL, "tiers": {"host_bytes": host_blocks * BLOCK_BYTES, "disk": disk}}


@pytest.fixture
def never_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier stays in use however often it fails."""
    monkeypatch.setattr(tiers_module, "_MOST_FAILURES", 1 << 60)


@pytest.fixture
def prompts(random_ids: Ids) -> list[tuple[int, ...]]:
    return [random_ids(200, seed) for seed in range(8)]


async def ids_of(engine: PyTorchEngine, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return (await collect(engine.decode(Prompt(prompt), greedy(TOKENS)))).ids


def _name(step: Step) -> str:
    return f"{step[0].__name__}.{step[1]}.{step[2].__name__}"


async def check_answers(llama: Checkpoint, engine: PyTorchEngine, prompts: list[tuple[int, ...]], rounds: int) -> None:
    right = [llama.generate(prompt, TOKENS) for prompt in prompts]
    for _ in range(rounds):
        assert [await ids_of(engine, prompt) for prompt in prompts] == right


# One of the device, of a seal and of the disk each, and one of no kind.
@pytest.mark.parametrize("step", sampled(STEPS, [STEPS[each] for each in (0, 5, 8, 9, 11)], _name))
@pytest.mark.usefixtures("never_closed")
async def test_a_step_that_fails_now_and_then_costs_no_token_and_blocks_no_later_write(
    llama: Checkpoint, prompts: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Step
) -> None:
    failures = failing_now_and_then(monkeypatch, [step], share=0.1)

    def all_writes_end(core: EngineCore) -> bool:
        tiers = settle(core)
        return not tiers._writes and len(tiers._free_buffers) == (256 << 20) // BLOCK_BYTES

    async with llama.engine(**on_disk(tmp_path / "kv")) as engine:
        await check_answers(llama, engine, prompts, 4)
        assert failures.total() > 0
        assert await engine._loop.call(all_writes_end)


@pytest.mark.parametrize("copy", ["copy_out", "copy_in"])
async def test_three_copies_that_fail_take_the_tier_out_of_use(
    llama: Checkpoint, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, copy: str
) -> None:
    failing_now_and_then(monkeypatch, [(Copier, copy, RuntimeError)], share=0.5)
    failed = since("baton_kv_tier_failures_total", tier="host")
    async with llama.engine(kv_cache_bytes=POOL, tiers={"host_bytes": 200 * BLOCK_BYTES}) as engine:
        await check_answers(llama, engine, prompts, 5)
        assert sample("baton_kv_tier_capacity_blocks", tier="host") == 0
    assert failed.grown >= 3


async def test_a_full_disk_is_taken_out_of_use_and_the_answers_stay_right(
    llama: Checkpoint, prompts: list[tuple[int, ...]]
) -> None:
    failed = since("baton_kv_tier_failures_total", tier="disk")
    async with llama.engine(**on_disk(Path("/dev/full"))) as engine:
        await check_answers(llama, engine, prompts, 2)
        assert sample("baton_kv_tier_capacity_blocks", tier="disk") == 0
    assert failed.grown >= 3


@pytest.mark.usefixtures("never_closed")
async def test_a_disk_that_is_full_amid_a_block_loses_that_block_alone(
    llama: Checkpoint, prompts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    failed = since("baton_kv_tier_failures_total", tier="disk")
    loaded = since("baton_kv_tier_hit_tokens_total", tier="disk")
    async with llama.engine(**on_disk(tmp_path / "kv")) as engine:
        with files_of_at_most(40 * SLOT_BYTES + 4096):
            await check_answers(llama, engine, prompts, 4)
    assert failed.grown > 0
    assert loaded.grown > 0


async def test_a_load_that_is_late_is_computed(
    llama: Checkpoint, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_in = Copier.copy_in

    def slowly(self: Copier, rows: Sequence[torch.Tensor], blocks: Sequence[int]) -> None:
        time.sleep(0.01 * len(blocks))
        copy_in(self, rows, blocks)

    monkeypatch.setattr(Copier, "copy_in", slowly)
    late = since("baton_kv_failed_loads_total", reason="late")
    tiers = {"host_bytes": 200 * BLOCK_BYTES, "load_patience_seconds": 0.001}
    async with llama.engine(kv_cache_bytes=POOL, tiers=tiers) as engine:
        await check_answers(llama, engine, prompts, 3)

        def tier_is_open(core: EngineCore) -> bool:
            assert core.tiers is not None
            return core.tiers.directory.total(KvTier.HOST) > 0

        assert await engine._loop.call(tier_is_open)
    assert late.grown > 0


class Gate:
    """An operation that waits: until `open`, or for as many calls as `let_through` was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
        self.reached = threading.Event()
        self._may_go = threading.Semaphore(0)
        self._is_open = False
        plain = getattr(kind, name)

        def run(*arguments: object) -> object:
            self.reached.set()
            if not self._is_open:
                assert self._may_go.acquire(timeout=60)
            return plain(*arguments)

        monkeypatch.setattr(kind, name, run)

    def let_through(self) -> None:
        self._may_go.release()

    def open(self) -> None:
        self._is_open = True
        for _ in range(100):
            self._may_go.release()


async def on_tiers(llama: Checkpoint, path: Path, run: Callable[[KvTiers], None]) -> None:
    """Runs something on the tiers of an engine: two blocks of host memory, and a disk."""

    def call(core: EngineCore) -> None:
        assert core.tiers is not None
        with torch.inference_mode():
            run(core.tiers)

    async with llama.engine(**on_disk(path, 2)) as engine:
        await engine._loop.call(call)


async def test_a_block_that_leaves_host_memory_as_soon_as_it_comes_takes_its_seal_along(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its way down to host memory and its spill wait at the same time, and are run together."""

    def run(tiers: KvTiers) -> None:
        gate = Gate(monkeypatch, Copier, "digest")
        for number in range(6):
            assert not tiers.demote([(number, NAMES[number])])
            assert gate.reached.wait(60)
        gate.open()
        tiers.settle(range(6))
        assert tiers._movers.writes.wait(tiers._writes, 60)
        tiers.poll()
        load = tiers.load([BlockContents(NAMES[number], 16) for number in range(4)], [8, 9, 10, 11])
        assert tiers._movers.disk_loads.wait([load], 60)
        assert (load.checked, load.failure) == (4, "")
        tiers.finish(load)

    await on_tiers(llama, tmp_path / "kv", run)


async def test_a_block_that_is_lost_and_spilled_again_is_not_read_before_its_second_write(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(tiers: KvTiers) -> None:
        gate = Gate(monkeypatch, DiskFile, "write")
        for number in (0, 1, 2):  # the last one spills the first
            assert not tiers.demote([(number, NAMES[number])])
        assert tiers.lose([NAMES[0]]) == 1
        for number in (0, 3, 4):  # which comes back, and is spilled again
            assert not tiers.demote([(number, NAMES[number])])
        tiers.settle(range(5))
        first = tiers._writes[0]
        gate.let_through()
        assert tiers._movers.writes.wait([first], 60)
        tiers.poll()
        assert tiers.directory.readable([BlockContents(NAMES[0], 16)]) == []
        gate.open()
        assert tiers._movers.writes.wait(tiers._writes, 60)
        tiers.poll()
        assert tiers.directory.readable([BlockContents(NAMES[0], 16)]) != []

    await on_tiers(llama, tmp_path / "kv", run)
