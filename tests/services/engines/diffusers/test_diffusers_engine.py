"""The diffusers engine on the demonstration model's pipeline, in float32 on the processor."""

import asyncio
import io
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from support.eventually import eventually
from torch import Tensor

from baton.errors import ConfigError, InvalidRequest, Overloaded
from services.engines.diffusion import Drawing, Picture, Step

if sys.version_info < (3, 11):
    pytest.skip("diffusers needs Python 3.11", allow_module_level=True)

from services.engines.diffusers.config import DiffusionConfig
from services.engines.diffusers.engine import DiffusersEngine
from services.engines.diffusers.pipeline import pipeline_class

CHECKPOINT = Path(__file__).parents[4] / "models" / "demo_diffusion"
CONFIG = DiffusionConfig(model=CHECKPOINT, device="cpu", threads=1, canary_seconds=None)
DRAWING = Drawing("a red circle", "", 5.0, 64, 64, steps=3, seed=4)


@pytest.fixture
async def engine() -> AsyncIterator[DiffusersEngine]:
    async with DiffusersEngine(CONFIG) as opened:
        yield opened


async def drawn(engine: DiffusersEngine, drawing: Drawing) -> tuple[list[Step], Picture]:
    *steps, last = [event async for event in engine.draw(drawing)]
    assert isinstance(last, Picture)
    return [step for step in steps if isinstance(step, Step)], last


async def test_the_same_drawing_gives_the_same_bytes_and_another_seed_others(engine: DiffusersEngine) -> None:
    first, again, other = [
        (await drawn(engine, drawing))[1].png for drawing in (DRAWING, DRAWING, replace(DRAWING, seed=5))
    ]
    assert first == again != other
    assert Image.open(io.BytesIO(first)).size == (64, 64)


async def test_steps_tell_what_is_left_and_show_previews(engine: DiffusersEngine) -> None:
    steps, picture = await drawn(engine, replace(DRAWING, steps=4, preview_steps=2))
    assert [(step.number, step.steps) for step in steps] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [bool(step.preview) for step in steps] == [False, True, False, False]
    assert Image.open(io.BytesIO(steps[1].preview)).size == (64, 64)
    assert (steps[2].remaining_seconds or 0) > 0
    assert (engine.predicted_seconds(DRAWING) or 0) > 0
    assert picture.png


async def test_closing_ends_the_work_within_a_step(engine: DiffusersEngine) -> None:
    before = engine.steps
    async with aclosing(engine.draw(replace(DRAWING, steps=90))) as events:
        await anext(events)
    await eventually(lambda: engine.load().running == 0)
    await drawn(engine, DRAWING)  # the thread is free again
    assert engine.steps - before <= 3 + DRAWING.steps


async def test_its_facts_are_those_of_the_pipeline(engine: DiffusersEngine) -> None:
    rules = engine.facts.drawing
    assert rules is not None
    assert (rules.width, rules.height, rules.negative_prompt, rules.previews) == (64, 64, True, True)
    assert engine.facts.images_only
    assert dict(engine.facts.settings)["pipeline"] == "StableDiffusionPipeline"


async def test_waiting_pictures_of_one_shape_are_one_batch_and_the_queue_is_bounded() -> None:
    config = CONFIG.model_copy(update={"max_batch": 3, "max_waiting": 3})
    async with DiffusersEngine(config) as engine:
        first = asyncio.ensure_future(drawn(engine, replace(DRAWING, steps=8)))
        await eventually(lambda: engine.load().running == 1)
        others = [asyncio.ensure_future(drawn(engine, replace(DRAWING, seed=seed))) for seed in (1, 2, 4)]
        await eventually(lambda: engine.load().waiting == 3)
        with pytest.raises(Overloaded):
            await drawn(engine, DRAWING)
        await asyncio.gather(first, *others)
        alone = Image.open(io.BytesIO((await drawn(engine, DRAWING))[1].png))
        together = Image.open(io.BytesIO((await others[2])[1].png))
        assert engine.steps == 8 + 3 + 3
    differences = [abs(a - b) for a, b in zip(alone.tobytes(), together.tobytes(), strict=True)]
    assert max(differences) <= 1


async def test_previews_that_nobody_reads_are_not_made(engine: DiffusersEngine) -> None:
    async with aclosing(engine.draw(replace(DRAWING, steps=40, preview_steps=1))) as events:
        first = await anext(events)
        await eventually(lambda: engine.load().running == 0)
        unread = [event async for event in events if isinstance(event, Step)]
    assert isinstance(first, Step)
    assert len(unread) == 39
    assert sum(bool(step.preview) for step in unread) <= 6


async def test_a_size_that_the_pipeline_refuses_fails_its_drawing_alone(engine: DiffusersEngine) -> None:
    with pytest.raises(InvalidRequest, match=r"options: StableDiffusionPipeline cannot draw this: .*divisible by 8"):
        await drawn(engine, replace(DRAWING, width=60, height=60))
    await drawn(engine, DRAWING)


async def test_a_size_that_the_networks_cannot_have_fails_its_drawing_alone(engine: DiffusersEngine) -> None:
    network = engine._pipeline.network

    def refuse(_network: object, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].shape[-1] != inputs[0].shape[-2]:
            raise RuntimeError("Sizes of tensors must match")

    with network.register_forward_pre_hook(refuse), pytest.raises(InvalidRequest, match="must match"):
        await drawn(engine, replace(DRAWING, width=32))
    await drawn(engine, DRAWING)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoSuchPipeline", "no pipeline 'NoSuchPipeline'"),
        (["pipeline", "MyPipeline"], "is not run"),
        ("logging", "no pipeline 'logging'"),
        ("DDPMPipeline", "takes no prompt"),
    ],
)
def test_a_class_that_cannot_be_used_is_named(tmp_path: Path, name: object, message: str) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(ConfigError, match=message):
        pipeline_class(tmp_path)


async def test_a_folder_that_lacks_a_part_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(CHECKPOINT, folder, ignore=shutil.ignore_patterns("vae", "*.py", "__pycache__"))
    with pytest.raises(ConfigError, match=r"engine\.model: .*broken"):
        async with DiffusersEngine(DiffusionConfig(model=folder, device="cpu")):
            pass
    with pytest.raises(ValueError, match=r"has no model_index\.json"):
        DiffusionConfig(model=tmp_path)
