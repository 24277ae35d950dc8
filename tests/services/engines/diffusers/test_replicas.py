"""Copies of the demonstration model's pipeline in one worker, in float32 on the processor."""

import asyncio
import sys
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from support.eventually import eventually

from services.engines.diffusion import Diffuser, Drawing, Picture

if sys.version_info < (3, 11):
    pytest.skip("diffusers needs Python 3.11", allow_module_level=True)

from services.engines.diffusers.config import DiffusionConfig
from services.engines.diffusers.engine import DiffusersEngine
from services.engines.diffusers.replicas import ReplicatedEngine

CHECKPOINT = Path(__file__).parents[4] / "models" / "demo_diffusion"
CONFIG = DiffusionConfig(model=CHECKPOINT, device="cpu", threads=1, canary_seconds=None)
DRAWING = Drawing("a red circle", "", 5.0, 64, 64, steps=3, seed=4)


async def picture(engine: Diffuser, drawing: Drawing) -> bytes:
    *_, last = [event async for event in engine.draw(drawing)]
    assert isinstance(last, Picture)
    return last.png


async def test_two_copies_draw_at_once_the_pictures_that_one_draws() -> None:
    drawings = [replace(DRAWING, seed=seed) for seed in range(4)]
    async with DiffusersEngine(CONFIG) as one:
        alone = [await picture(one, drawing) for drawing in drawings]
    async with ReplicatedEngine(CONFIG.model_copy(update={"data_parallel_size": 2})) as two:
        assert two.facts.drawing is not None
        assert dict(two.facts.settings)["data_parallel_size"] == "2"
        drawing = asyncio.gather(*[picture(two, drawing) for drawing in drawings])
        # A single engine computes one picture at a time.
        await eventually(lambda: two.load().running == 2)
        assert await drawing == alone
        assert [engine.steps for engine in two._engines] == [6, 6]
        each = two.predicted_seconds([DRAWING])
        assert two.predicted_seconds([DRAWING] * 2) == each
        assert two.healthy
        assert two.responsive


async def test_closing_a_drawing_frees_its_copy_alone() -> None:
    async with ReplicatedEngine(CONFIG.model_copy(update={"data_parallel_size": 2})) as engine:
        kept = asyncio.ensure_future(picture(engine, replace(DRAWING, steps=20)))
        await eventually(lambda: engine.load().running == 1)
        async with aclosing(engine.draw(replace(DRAWING, steps=90))) as events:
            await anext(events)
            assert engine.load().running == 2
        await eventually(lambda: engine.load().running <= 1)
        await kept
        assert sum(copy.steps for copy in engine._engines) < 20 + 90


async def test_a_copy_that_has_ended_makes_the_worker_unhealthy() -> None:
    async with ReplicatedEngine(CONFIG.model_copy(update={"data_parallel_size": 2})) as engine:
        last = engine._engines[1]
        await last._loop.__aexit__()
        await eventually(lambda: not last.healthy)
        assert not engine.healthy
        assert not engine.responsive


async def test_no_drawing_goes_to_a_copy_that_has_ended() -> None:
    async with ReplicatedEngine(CONFIG.model_copy(update={"data_parallel_size": 2})) as engine:
        first = engine._engines[0]
        await first._loop.__aexit__()
        await eventually(lambda: not first.healthy)
        drawings = [replace(DRAWING, seed=seed) for seed in range(3)]
        assert all(await asyncio.gather(*[picture(engine, drawing) for drawing in drawings]))
        assert [copy.steps for copy in engine._engines] == [0, 9]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 2, "device": "cuda:1"}, "data_parallel_size: cuda:1 is one GPU"),
        ({"data_parallel_size": 0}, "data_parallel_size"),
    ],
)
def test_sizes_that_cannot_be_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiffusionConfig.model_validate({"model": CHECKPOINT, **options})
