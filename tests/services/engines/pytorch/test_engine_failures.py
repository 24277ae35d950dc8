"""A failure of one request, or of the engine, and its effect on other requests."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines.device import DEVICE
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import blocks_used, collect, greedy
from support.eventually import eventually

from baton.errors import ConfigError, EngineFailed
from services.engines.base import NotOpened
from services.engines.prompt import Prompt
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.failures import StallDetector
from services.engines.pytorch.parallel.followers import check_split
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.runners.runner import InflightStep

POISON = 300
GOOD = Prompt(tuple(range(20, 70)))
BAD = Prompt((*range(20, 52), POISON, *range(40, 70)))


@pytest.fixture
def poisoned(llama: Checkpoint, tmp_path: Path) -> Checkpoint:
    """A model whose logits are NaN once it has read one certain token."""
    tensors = load_file(llama.path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((llama.path / name).read_bytes())
    return Checkpoint(tmp_path, llama.plain)


async def test_a_request_that_computes_no_numbers_fails_alone(poisoned: Checkpoint) -> None:
    async with poisoned.engine() as engine:
        alone = await collect(engine.decode(GOOD, greedy(30)))
        beside, failed = await asyncio.gather(
            collect(engine.decode(GOOD, greedy(30))), collect(engine.decode(BAD, greedy(30))), return_exceptions=True
        )
        assert isinstance(failed, EngineFailed)
        assert not isinstance(beside, BaseException)
        assert beside.ids == alone.ids
        assert engine.healthy
        assert blocks_used(engine) == 0


async def test_the_blocks_of_a_failed_request_harm_no_later_one(poisoned: Checkpoint) -> None:
    small = {"kv_cache_bytes": 12 * 12288, "max_step_tokens": 70}
    async with poisoned.engine(**small) as engine:
        alone = await collect(engine.decode(GOOD, greedy(20)))
        for _ in range(3):
            with pytest.raises(EngineFailed):
                await engine.prefill(BAD, greedy(2))
            assert (await collect(engine.decode(GOOD, greedy(20)))).ids == alone.ids


def _before_steps(engine: PyTorchEngine, act: Callable[[Sequence[Chunk]], None]) -> None:
    """Calls `act` on the engine's thread before each step from now on."""
    start = engine.runner.start

    def start_after(chunks: Sequence[Chunk]) -> InflightStep:
        act(chunks)
        return start(chunks)

    engine.runner.start = start_after  # type: ignore[method-assign]


def _break(engine: PyTorchEngine) -> None:
    """Makes every step raise from now on, as a lost device does."""

    def lose(_chunks: object) -> None:
        raise RuntimeError("the device is lost")

    _before_steps(engine, lose)


async def test_an_engine_that_breaks_fails_everything_and_says_so(llama: Checkpoint) -> None:
    async with llama.engine(max_sequences=2) as engine:
        running = [asyncio.create_task(collect(engine.decode(Prompt((i + 5,)), greedy(1500)))) for i in range(4)]
        reserving = asyncio.create_task(engine.reserve(GOOD, 50))
        await eventually(lambda: engine.load().running == 2 and engine.load().waiting == 3)
        _break(engine)
        outcomes = await asyncio.gather(*running, reserving, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineFailed] * 5
        assert not engine.healthy
        with pytest.raises(EngineFailed):
            await engine.prefill(GOOD, greedy(2))
        with pytest.raises(EngineFailed):
            await collect(engine.decode(GOOD, greedy(2)))


async def test_what_is_held_can_be_released_after_the_engine_broke(llama: Checkpoint) -> None:
    async with llama.engine() as engine:
        held = await engine.prefill(GOOD, greedy(2))
        _break(engine)
        with pytest.raises(EngineFailed):
            await engine.prefill(GOOD, greedy(2))
        assert await held.release() == 0


async def test_leaving_the_engine_ends_what_runs_in_it(llama: Checkpoint) -> None:
    async with llama.engine() as engine:
        running = asyncio.create_task(collect(engine.decode(GOOD, greedy(1500))))
        await eventually(lambda: engine.load().running == 1)
    with pytest.raises(EngineFailed, match="closed"):
        await running


async def test_an_engine_that_is_stuck_in_a_step_is_not_healthy(llama: Checkpoint) -> None:
    going_on = threading.Event()
    async with llama.engine(stall_seconds=0.2) as engine:
        await collect(engine.decode(GOOD, greedy(5)))
        _before_steps(engine, lambda _chunks: going_on.wait())
        stuck = asyncio.create_task(collect(engine.decode(GOOD, greedy(5))))
        await eventually(lambda: not engine.healthy)
        going_on.set()
        await stuck
        assert engine.healthy


async def test_an_idle_engine_that_does_not_answer_its_canary_is_not_healthy(llama: Checkpoint) -> None:
    going_on = threading.Event()
    async with llama.engine(stall_seconds=60.0, canary_seconds=0.1, canary_patience_seconds=0.3) as engine:
        _before_steps(engine, lambda _chunks: going_on.wait())
        await eventually(lambda: not engine.healthy)
        going_on.set()
        await eventually(lambda: engine.healthy)


@pytest.mark.skipif(DEVICE != "cpu", reason="an engine on a GPU does not release its memory")
async def test_an_engine_that_hangs_is_seen_after_a_release_of_its_memory_was_given_up(llama: Checkpoint) -> None:
    hanging, going_on = threading.Event(), threading.Event()

    def hang(_chunks: object) -> None:
        hanging.set()
        going_on.wait()

    async with llama.engine(stall_seconds=3600.0, canary_seconds=0.1, canary_patience_seconds=0.3) as engine:
        memory = engine.releases_memory
        assert memory is not None
        _before_steps(engine, hang)
        await eventually(hanging.is_set)
        release = asyncio.create_task(memory.release_memory())
        await asyncio.sleep(0)
        release.cancel()
        await asyncio.wait([release])
        try:
            await eventually(lambda: not engine.healthy)
        finally:
            going_on.set()
        await eventually(lambda: engine.healthy)


async def test_an_idle_engine_that_answers_stays_healthy_and_keeps_nothing(llama: Checkpoint) -> None:
    async with llama.engine(canary_seconds=0.05, canary_patience_seconds=5.0) as engine:
        steps: list[object] = []
        _before_steps(engine, steps.append)
        await eventually(lambda: len(steps) > 3)
        assert engine.healthy
        await eventually(lambda: engine.load().blocks_used == 0)


async def test_a_step_that_is_long_and_goes_on_is_not_stuck(llama: Checkpoint) -> None:
    async with llama.engine(stall_seconds=2.5, canary_seconds=0.1, canary_patience_seconds=2.5) as engine:
        # Each of the three layers takes less than the limit, and the step more than all three.
        layers = next(part for part in engine.module.modules() if isinstance(part, torch.nn.ModuleList))
        hooks = [layer.register_forward_hook(lambda *_: time.sleep(0.9)) for layer in layers]
        decoding = asyncio.create_task(collect(engine.decode(GOOD, greedy(2))))
        while not decoding.done():
            assert engine.healthy
            await asyncio.sleep(0.02)
        assert len((await decoding).ids) == 2
        for hook in hooks:
            hook.remove()


def test_a_hung_engine_is_found_within_15_seconds_by_default(tmp_path: Path) -> None:
    config = PyTorchConfig(model=tmp_path)
    assert (config.canary_seconds or 0) <= 5
    assert (config.canary_seconds or 0) * 0.55 + config.canary_patience_seconds < 14
    assert StallDetector(torch.nn.Module(), config.stall_seconds)._seconds < 14


async def test_an_engine_that_waits_for_work_is_healthy(llama: Checkpoint) -> None:
    async with llama.engine(stall_seconds=0.1) as engine:
        await asyncio.sleep(0.3)
        assert engine.healthy


@pytest.mark.parametrize("execution", ["library", "fused"])
async def test_a_step_without_memory_ends_its_largest_request_only(llama: Checkpoint, execution: str) -> None:
    """The whole engine, and every request with it, must not fail."""
    async with llama.engine(execution=execution) as engine:
        alone = await collect(engine.decode(GOOD, greedy(200)))
        beside = asyncio.create_task(collect(engine.decode(GOOD, greedy(200))))
        await eventually(lambda: engine.load().running == 1)

        def run_out(chunks: Sequence[Chunk]) -> None:
            if any(chunk.count > 300 for chunk in chunks):
                raise torch.OutOfMemoryError("out of memory")

        _before_steps(engine, run_out)
        with pytest.raises(EngineFailed, match="too little memory"):
            await collect(engine.decode(Prompt(tuple(range(5, 255)) * 2), greedy(2)))
        assert (await beside).ids == alone.ids
        assert engine.healthy
        assert blocks_used(engine) == 0


async def test_nothing_can_be_used_before_the_engine_is_opened_and_leaving_twice_is_harmless(
    llama: Checkpoint,
) -> None:
    engine = llama.engine()
    uses: list[Callable[[], object]] = [
        lambda: engine.facts,
        lambda: engine.healthy,
        lambda: engine.memory,
        engine.load,
        lambda: engine.decode(GOOD, greedy(2)),
    ]
    for use in uses:
        with pytest.raises(NotOpened, match="the engine has not been opened"):
            use()
    with pytest.raises(NotOpened):
        await engine.prefill(GOOD, greedy(2))
    async with engine:
        assert len((await collect(engine.decode(GOOD, greedy(2)))).ids) == 2
    await engine.__aexit__(None, None, None)
    with pytest.raises(EngineFailed, match="closed"):
        await engine.prefill(GOOD, greedy(2))


def test_a_split_over_more_gpus_than_there_are_is_refused_with_both_numbers(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ConfigError, match="2 GPUs are needed, and this process sees 1"):
        check_split(PyTorchConfig(model=llama.path, device="cuda", tensor_parallel_size=2))


def test_one_gpu_by_its_index_is_refused_for_a_model_that_is_split_among_several(llama: Checkpoint) -> None:
    with pytest.raises(ValueError, match="cuda:1 is one GPU, and each rank has its own"):
        PyTorchConfig(model=llama.path, device="cuda:1", tensor_parallel_size=2)


async def test_a_refusal_that_comes_when_the_caller_has_left_is_not_logged_as_lost(poisoned: Checkpoint) -> None:
    lost: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: lost.append(context["message"]))
    async with poisoned.engine() as engine:
        for steps in range(40):
            refused = asyncio.create_task(collect(engine.decode(Prompt((10**6,)), greedy(1))))
            for _ in range(steps % 8):
                await asyncio.sleep(0)
            refused.cancel()
            await asyncio.wait([refused])
        await collect(engine.decode(GOOD, greedy(1)))
    gc.collect()
    assert lost == []
