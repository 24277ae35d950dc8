"""What happens to others when a request, or the engine itself, fails."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.embedded import Checkpoint
from support.engine_calls import blocks_used, collect, greedy, until

from rpc.errors import EngineFailed
from services.engines.pytorch.engine import PyTorchEngine
from services.prompt import Prompt

POISON = 300
GOOD = Prompt(tuple(range(20, 70)))
BAD = Prompt((*range(20, 52), POISON, *range(40, 70)))


@pytest.fixture
def poisoned(llama: Checkpoint, tmp_path: Path) -> Checkpoint:
    """A model whose numbers are none as soon as it reads one certain token."""
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


async def _break(engine: PyTorchEngine) -> None:
    """Gives the model a weight that fits nothing, as the device's loss would: every step raises from now on."""
    module = engine._core._runner._module
    await engine._loop.call(lambda _core: setattr(module.lm_head, "weight", torch.nn.Parameter(torch.zeros(3, 3))))


async def test_an_engine_that_breaks_fails_everything_and_says_so(llama: Checkpoint) -> None:
    async with llama.engine(max_sequences=2) as engine:
        running = [asyncio.create_task(collect(engine.decode(Prompt((i + 5,)), greedy(1500)))) for i in range(4)]
        reserving = asyncio.create_task(engine.reserve(GOOD, 50))
        await until(lambda: engine.load().running == 2 and engine.load().waiting == 3)
        await _break(engine)
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
        await _break(engine)
        with pytest.raises(EngineFailed):
            await engine.prefill(GOOD, greedy(2))
        assert await held.release() == 0


async def test_leaving_the_engine_ends_what_runs_in_it(llama: Checkpoint) -> None:
    async with llama.engine() as engine:
        running = asyncio.create_task(collect(engine.decode(GOOD, greedy(1500))))
        await until(lambda: engine.load().running == 1)
    with pytest.raises(EngineFailed, match="closed"):
        await running


async def test_an_engine_that_is_stuck_in_a_step_is_not_healthy(llama: Checkpoint) -> None:
    going_on = threading.Event()
    async with llama.engine(stall_seconds=0.2) as engine:
        await collect(engine.decode(GOOD, greedy(5)))
        stuck = asyncio.ensure_future(engine._loop.call(lambda _core: going_on.wait()))
        await until(lambda: not engine.healthy)
        going_on.set()
        await stuck
        assert engine.healthy


async def test_an_engine_that_waits_for_work_is_healthy(llama: Checkpoint) -> None:
    async with llama.engine(stall_seconds=0.1) as engine:
        await asyncio.sleep(0.3)
        assert engine.healthy
