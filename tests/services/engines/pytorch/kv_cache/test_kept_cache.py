"""The prefix cache in kept memory: used again by the next engine, and only what is whole."""

import dataclasses
import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from structlog.testing import capture_logs
from structlog.typing import EventDict
from support.cluster.forked import ForkedProcess
from support.engines.checkpoints import PlainModel, save_llama
from support.engines.device import DEVICE
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import blocks_used, collect, greedy
from support.eventually import eventually
from support.keeping import KeepsHere, keeper_here
from support.sampled import sampled

from baton.errors import EngineFailed
from services.engines.context import KeptMemory
from services.engines.kv import KvLayout
from services.engines.kv_events import KvSnapshot
from services.engines.prompt import Prompt
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.kv_cache.digester import Digests
from services.engines.pytorch.kv_cache.kept_cache import KeptCache
from services.engines.pytorch.kv_cache.memory import HostMemory
from services.engines.seals import SEAL_BYTES

PROMPT = tuple(range(5, 105))
LAYOUT = KvLayout("ab" * 32, "float32", 1, 2, 1, 4, 8, 256)
BLOCKS = 40
_FULL = os.environ.get("BATON_FAULTS") == "full"
# How many kills: at any time, and in the middle of writes, where a block is half written.
_KILLS = [("250" if _FULL else "12",), ("250" if _FULL else "8", "--at-writes")]
_DECODE_KILLS = [("10",), ("900" if _FULL else "12", "--at-writes", "--seed=100")]
_END_SECONDS = 2900 if _FULL else 280


@pytest.fixture
def keeper() -> Iterator[KeepsHere]:
    with keeper_here() as found:
        yield found


def _engine(checkpoint: Checkpoint, kept: KeptMemory, **options: object) -> PyTorchEngine:
    return PyTorchEngine(checkpoint.config(**options), kept=kept)


async def test_the_next_engine_computes_only_what_was_not_in_a_full_block(
    checkpoint: Checkpoint, keeper: KeepsHere
) -> None:
    with keeper.memory(kv=True) as kept:
        async with _engine(checkpoint, kept) as engine:
            first = await collect(engine.decode(Prompt(PROMPT), greedy(20)))
    with keeper.memory(kv=True) as kept:
        async with _engine(checkpoint, kept) as engine:
            again = await collect(engine.decode(Prompt(PROMPT), greedy(20)))
            # As a router continues an answer whose worker was lost.
            continued = await collect(engine.decode(Prompt(PROMPT, first.ids[:13]), greedy(20)))
            assert blocks_used(engine) == 0
    assert again.ids == first.ids
    assert again.finished.cached_tokens == 96
    assert continued.ids == first.ids[13:]
    assert continued.finished.cached_tokens == 112


def _has(logs: Sequence[EventDict], event: str) -> bool:
    return any(entry["event"] == event for entry in logs)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU, and BATON_TEST_DEVICE=cuda")
async def test_an_engine_that_starts_again_on_a_gpu_captures_its_steps_later(
    llama: Checkpoint, keeper: KeepsHere
) -> None:
    expected = llama.generate(PROMPT, 40)
    for starts in (0, 1):
        with keeper.memory(weights=True, kv=True, starts=starts) as kept, capture_logs() as logs:
            async with _engine(llama, kept) as engine:
                [first] = [entry["sizes"] for entry in logs if entry["event"] == "decode steps captured"]
                assert (len(first) == 1) == bool(starts)
                answer = await collect(engine.decode(Prompt(PROMPT), greedy(40)))
                if starts:
                    await eventually(lambda logs=logs: _has(logs, "step captured"))
                again = await collect(engine.decode(Prompt(PROMPT), greedy(40)))
        assert answer.ids[: len(expected)] == expected
        assert again.ids == answer.ids


@pytest.mark.parametrize(
    ("error", "cached"),
    [(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), 0), (RuntimeError("other"), 96)],
)
async def test_kv_is_not_used_after_an_error_of_the_device(
    llama: Checkpoint, keeper: KeepsHere, error: RuntimeError, cached: int
) -> None:
    def fail(_chunks: object) -> NoReturn:
        raise error

    with keeper.memory(kv=True) as kept:
        async with _engine(llama, kept) as engine:
            await collect(engine.decode(Prompt(PROMPT), greedy(4)))
            engine.runner.start = fail  # type: ignore[method-assign]
            with pytest.raises(EngineFailed):
                await collect(engine.decode(Prompt(PROMPT), greedy(4)))
    with keeper.memory(kv=True) as kept:
        async with _engine(llama, kept) as engine:
            again = await collect(engine.decode(Prompt(PROMPT), greedy(4)))
    assert again.finished.cached_tokens == cached


async def test_routers_are_told_of_the_blocks_that_were_found(llama: Checkpoint, keeper: KeepsHere) -> None:
    snapshots = []
    for _ in range(2):
        with keeper.memory(kv=True) as kept:
            async with _engine(llama, kept) as engine, aclosing(engine.kv_changes()) as changes:
                snapshots.append(await anext(changes))
                await collect(engine.decode(Prompt(PROMPT), greedy(4)))
    assert isinstance(snapshots[0], KvSnapshot)
    assert isinstance(snapshots[1], KvSnapshot)
    assert len(snapshots[0].block_hashes) == 0
    assert len(snapshots[1].block_hashes) == 6


@pytest.mark.parametrize("options", [{"kv_cache_bytes": 32 << 20}, {"block_tokens": 8}])
async def test_kv_of_another_layout_is_not_used(
    llama: Checkpoint, keeper: KeepsHere, options: dict[str, object]
) -> None:
    cached = []
    for each in ({}, options, {}):
        with keeper.memory(kv=True) as kept:
            async with _engine(llama, kept, **each) as engine:
                cached.append((await collect(engine.decode(Prompt(PROMPT), greedy(4)))).finished.cached_tokens)
    assert cached == [0, 0, 0]


async def test_kv_of_a_checkpoint_whose_files_have_changed_is_not_used(tmp_path: Path, keeper: KeepsHere) -> None:
    checkpoint = Checkpoint(save_llama(tmp_path), PlainModel(tmp_path))
    for _ in range(2):
        with keeper.memory(kv=True) as kept:
            async with _engine(checkpoint, kept) as engine:
                answer = await collect(engine.decode(Prompt(PROMPT), greedy(4)))
        os.utime(tmp_path / "model.safetensors")
    assert answer.finished.cached_tokens == 0


class _Kept:
    """A pool of random blocks in kept memory, and its seals, which can be opened again and damaged."""

    def __init__(self) -> None:
        self.pool, self.seals = os.memfd_create("pool"), os.memfd_create("seals")
        os.ftruncate(self.pool, BLOCKS * LAYOUT.block_bytes)
        os.ftruncate(self.seals, BLOCKS * SEAL_BYTES)
        os.pwrite(self.seals, b"an epoch", 0)

    def open(self) -> tuple[KeptCache, HostMemory]:
        memory = HostMemory(LAYOUT, BLOCKS, os.dup(self.pool))
        return KeptCache(os.dup(self.seals), memory, LAYOUT), memory

    def fill(self, blocks: Sequence[int]) -> dict[int, bytes]:
        cache, memory = self.open()
        for block in range(1, BLOCKS):
            memory.write([block]).views[0][:] = random.Random(block).randbytes(LAYOUT.block_bytes)
        names = {block: block.to_bytes(16, "little") for block in blocks}
        for block, name in names.items():
            cache.stored(block, name)
        return names

    def flip(self, file: int, at: int, bit: int) -> None:
        [byte] = os.pread(file, 1, at)
        os.pwrite(file, bytes([byte ^ 1 << bit]), at)


def test_a_thousand_flipped_bits_are_found() -> None:
    kept, chosen = _Kept(), random.Random(1)
    blocks = [*range(1, BLOCKS, 2), 2]
    names = kept.fill(blocks)
    assert kept.open()[0].recover() == names
    for number in range(1000):
        names = kept.fill(blocks)
        block, bit = chosen.choice(blocks), chosen.randrange(8)
        if number % 2:
            kept.flip(kept.pool, block * LAYOUT.block_bytes + chosen.randrange(LAYOUT.block_bytes), bit)
        else:
            kept.flip(kept.seals, block * SEAL_BYTES + chosen.randrange(SEAL_BYTES), bit)
        del names[block]
        assert kept.open()[0].recover() == names


def test_seals_of_another_epoch_are_not_trusted() -> None:
    kept = _Kept()
    kept.fill(range(1, 10))
    kept.flip(kept.seals, 3, 2)
    assert not kept.open()[0].recover()


def test_a_seal_that_is_torn_is_found() -> None:
    kept = _Kept()
    names = kept.fill([3, 4])
    for size in range(1, SEAL_BYTES):
        kept.fill([3, 4])
        # An erasure that has come as far as this, unless what is left was zero before.
        os.pwrite(kept.seals, bytes(size), 3 * SEAL_BYTES)
        assert kept.open()[0].recover() == {4: names[4]}


class _Arrival:
    """The end of what a GPU would compute, which the test tells."""

    def __init__(self) -> None:
        self.has_come = False
        self.waits = 0

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        self.waits += 1


class _SlowMemory(HostMemory):
    """Host memory whose digests take their time, as those of a GPU do."""

    digests_beside_steps = True
    arrivals: tuple[_Arrival, ...] = ()

    def begin_digest(self, block_ids: Sequence[int]) -> Digests:
        self.arrivals += (_Arrival(),)
        return Digests(super().begin_digest(block_ids).home, self.arrivals[-1])


def _slow(kept: _Kept) -> tuple[KeptCache, _SlowMemory]:
    kept.fill([])
    memory = _SlowMemory(LAYOUT, BLOCKS, os.dup(kept.pool))
    return KeptCache(os.dup(kept.seals), memory, LAYOUT), memory


def test_blocks_are_sealed_once_their_digests_are_there() -> None:
    kept = _Kept()
    cache, memory = _slow(kept)
    cache.stored(3, b"n" * 16)
    cache.flush()
    cache.stored(4, b"m" * 16)
    cache.flush()
    assert len(memory.arrivals) == 1
    assert kept.open()[0].recover() == {}
    memory.arrivals[0].has_come = True
    cache.flush()
    assert len(memory.arrivals) == 2
    assert os.pread(kept.seals, 16, 3 * SEAL_BYTES) == b"n" * 16
    assert os.pread(kept.seals, 16, 4 * SEAL_BYTES) == bytes(16)


def test_while_there_is_no_step_all_blocks_are_sealed() -> None:
    kept = _Kept()
    cache, memory = _slow(kept)
    cache.stored(3, b"n" * 16)
    cache.flush()
    cache.stored(4, b"m" * 16)
    cache.finish()
    assert [arrival.waits for arrival in memory.arrivals] == [1, 1]
    assert kept.open()[0].recover() == {3: b"n" * 16, 4: b"m" * 16}


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_block_that_is_used_anew_meanwhile_gets_no_seal(*, is_begun: bool) -> None:
    kept = _Kept()
    cache, memory = _slow(kept)
    cache.stored(3, b"n" * 16)
    cache.stored(4, b"m" * 16)
    if is_begun:
        cache.flush()
    cache.erased(3)
    cache.flush()
    memory.arrivals[0].has_come = True
    cache.flush()
    assert kept.open()[0].recover() == {4: b"m" * 16}


def test_nothing_is_used_again_after_a_device_has_failed() -> None:
    kept = _Kept()
    names = kept.fill([3, 4])
    kept.open()[0].distrust()
    cache, memory = kept.open()
    assert cache.recover() == {}
    assert bytes(memory.read([3])[0]) == bytes(LAYOUT.block_bytes)
    assert kept.fill([3, 4]) == names
    assert kept.open()[0].recover() == names


def test_one_content_in_two_blocks_is_used_once() -> None:
    kept = _Kept()
    kept.fill([])
    cache, _ = kept.open()
    cache.stored(3, b"n" * 16)
    cache.stored(7, b"n" * 16)
    assert kept.open()[0].recover() == {7: b"n" * 16}
    assert kept.open()[0].recover() == {7: b"n" * 16}


@pytest.mark.parametrize("size", [256, 4096, 6144])
def test_all_other_blocks_are_zero(size: int) -> None:
    layout = dataclasses.replace(LAYOUT, block_bytes=size, head_dim=size // 32)
    memory = HostMemory(layout, BLOCKS)
    for block in range(BLOCKS):
        memory.write([block]).views[0][:] = b"\xff" * size
    memory.clear_all_but({5, 6, 20})
    for block in range(BLOCKS):
        expected = b"\xff" if block in (5, 6, 20) else b"\0"
        assert bytes(memory.read([block])[0]) == expected * size


def _kill(folder: Path, *options: str, program: str = "dying_engine") -> dict[str, object]:
    log = folder / "log"
    process = ForkedProcess(f"support.engines.{program}", [str(save_llama(folder)), *options], os.environ, log)
    assert process.wait(_END_SECONDS) == 0, log.read_text()[-2000:]
    report: dict[str, object] = json.loads(log.read_text().splitlines()[-1])
    print(report)
    return report


@pytest.mark.timeout(3000 if _FULL else 300)
@pytest.mark.parametrize("options", sampled(_KILLS, _KILLS[1:], " ".join))
def test_engines_that_are_killed_give_no_wrong_token_and_leak_no_block(tmp_path: Path, options: Sequence[str]) -> None:
    report = _kill(tmp_path, *options)
    assert report["kills"] == int(options[0])
    assert report["wrong"] == 0
    assert report["problems"] == []
    assert int(str(report["recovered"])) > 0


def test_a_planted_error_of_order_is_found(tmp_path: Path) -> None:
    assert int(str(_kill(tmp_path, "12", "--broken")["wrong"])) > 0


@pytest.mark.timeout(3000 if _FULL else 300)
@pytest.mark.parametrize("options", sampled(_DECODE_KILLS, _DECODE_KILLS[1:], " ".join))
def test_decodes_of_engines_that_are_killed_go_on_exactly(tmp_path: Path, options: Sequence[str]) -> None:
    report = _kill(tmp_path, *options, program="dying_decodes")
    assert report["kills"] == int(options[0])
    assert report["wrong"] == 0
    assert report["problems"] == []
    assert int(str(report["complete"])) > 0


def test_kv_that_decodes_have_lost_is_found(tmp_path: Path) -> None:
    assert int(str(_kill(tmp_path, "8", "--broken", program="dying_decodes")["wrong"])) > 0
