"""The diffusers engine on the demonstration model's pipeline, in float32 on the processor."""

import asyncio
import io
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
from PIL import Image
from support.eventually import eventually
from torch import Tensor, device
from torch.nn import Module

from baton.errors import ConfigError, InvalidRequest, Overloaded
from services.engines.diffusion import Clip, ClipOptions, Drawing, Picture, Step
from services.engines.rules import ClipRules

if sys.version_info < (3, 11):
    pytest.skip("diffusers needs Python 3.11", allow_module_level=True)

import av
from accelerate import cpu_offload
from support.engines.pipelines import write_latte, write_wan

from services.engines.diffusers.config import DiffusionConfig
from services.engines.diffusers.engine import DiffusersEngine
from services.engines.diffusers.pipeline import mp4, pipeline_class

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
    assert (engine.predicted_seconds([DRAWING] * 3) or 0) > (engine.predicted_seconds([DRAWING]) or 0) > 0
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
    assert rules.clips is None
    assert dict(engine.facts.settings)["pipeline"] == "StableDiffusionPipeline"


async def test_waiting_pictures_of_one_shape_are_one_batch_and_the_queue_is_bounded(tmp_path: Path) -> None:
    config = CONFIG.model_copy(
        update={"max_batch": 3, "max_waiting": 3, "model": write_wan(tmp_path), "width": 64, "height": 64}
    )
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


async def test_a_pipeline_that_draws_other_pictures_in_a_batch_is_refused_by_the_field(tmp_path: Path) -> None:
    """Latte leaves a prompt's padding out if it draws one picture alone."""
    config = CONFIG.model_copy(update={"max_batch": 2, "model": write_latte(tmp_path)})
    with pytest.raises(ConfigError, match=r"engine\.max_batch: must be 1, since LattePipeline"):
        async with DiffusersEngine(config):
            pass


CLIP = replace(DRAWING, prompt="a red circle moves left", clip=ClipOptions(frames=8, frames_per_second=12.5))


@pytest.fixture
async def filming(tmp_path: Path) -> AsyncIterator[DiffusersEngine]:
    config = CONFIG.model_copy(update={"model": write_latte(tmp_path), "frames": 8, "max_frames": 8})
    async with DiffusersEngine(config) as opened:
        yield opened


async def test_a_clip_is_its_frames_or_one_mp4_of_them_and_the_same_each_time(filming: DiffusersEngine) -> None:
    engine = filming
    clip, again = [await clip_of(engine, CLIP) for _ in range(2)]
    as_file = await clip_of(engine, replace(CLIP, clip=ClipOptions(8, 12.5, is_mp4=True)))
    assert clip == again
    assert (len(clip.frames), clip.mp4, as_file.frames) == (8, b"", ())
    with av.open(io.BytesIO(as_file.mp4)) as container:
        [stream] = container.streams.video
        assert (stream.codec_context.name, stream.average_rate, stream.width) == ("h264", Fraction(25, 2), 64)
        decoded = [frame.to_ndarray(format="rgb24").astype(int) for frame in container.decode(stream)]
    drawn = [numpy.asarray(Image.open(io.BytesIO(png))).astype(int) for png in clip.frames]
    assert len(decoded) == 8
    assert all(abs(one - other).mean() < 24 for one, other in zip(decoded, drawn, strict=True))


async def test_frames_that_cannot_be_an_mp4_fail_their_drawing_alone(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"model": write_latte(tmp_path)})
    async with DiffusersEngine(config) as engine:
        for rate in (float("nan"), float("inf")):
            drawing = replace(CLIP, clip=ClipOptions(8, rate, is_mp4=True))
            with pytest.raises(InvalidRequest, match="LattePipeline cannot draw this"):
                await clip_of(engine, drawing)
        await drawn(engine, DRAWING)


def test_an_odd_size_is_no_mp4() -> None:
    with pytest.raises(ValueError, match="cannot be written as MP4"):
        mp4([Image.new("RGB", (63, 63))] * 2, 8.0)


async def clip_of(engine: DiffusersEngine, drawing: Drawing) -> Clip:
    last = [event async for event in engine.draw(drawing)][-1]
    assert isinstance(last, Clip)
    return last


async def test_the_rules_of_clips_are_those_of_the_configuration(filming: DiffusersEngine) -> None:
    rules = filming.facts.drawing
    assert rules is not None
    assert rules.clips == ClipRules(8, 8, frame_multiple=1, frames_per_second=8.0, mp4=True)
    assert rules.previews
    assert (rules.width, rules.height) == (64, 64)


async def test_a_preview_of_a_clip_is_its_first_frame(filming: DiffusersEngine) -> None:
    engine = filming
    events = [event async for event in engine.draw(replace(CLIP, preview_steps=1))]
    previews = [event.preview for event in events if isinstance(event, Step)]
    assert [bool(preview) for preview in previews] == [True, True, False]
    assert Image.open(io.BytesIO(previews[0])).size == (64, 64)


async def test_a_number_of_frames_that_the_network_cannot_have_fails_its_drawing_alone(
    filming: DiffusersEngine,
) -> None:
    engine = filming
    with pytest.raises(InvalidRequest, match="LattePipeline cannot draw this"):
        await clip_of(engine, replace(CLIP, clip=ClipOptions(5, 8.0)))
    await drawn(engine, DRAWING)


async def test_a_pipeline_that_rounds_the_number_of_frames_says_so_instead_of_drawing_another(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"model": write_wan(tmp_path), "width": 64, "height": 64})
    async with DiffusersEngine(config) as engine:
        rules = engine.facts.drawing
        assert rules is not None
        assert rules.clips is not None
        assert rules.clips.frame_multiple == 4
        with pytest.raises(InvalidRequest, match=r"it makes \[5\] frames where \[4\] are asked for"):
            await clip_of(engine, replace(CLIP, clip=ClipOptions(4, 8.0)))
        assert len((await clip_of(engine, replace(CLIP, clip=ClipOptions(5, 8.0)))).frames) == 5


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


async def test_layers_that_are_offloaded_draw_the_same_and_go_back_however_it_ends(engine: DiffusersEngine) -> None:
    _, whole = await drawn(engine, DRAWING)
    networks = [part for part in engine._pipeline._pipeline.components.values() if isinstance(part, Module)]
    for network in networks:
        # As diffusers does it for a GPU.
        cpu_offload(network, device("cpu"), offload_buffers=bool(network._parameters))
    steps, again = await drawn(engine, replace(DRAWING, preview_steps=2))
    assert again == whole
    assert [bool(step.preview) for step in steps] == [False, True, False]
    async with aclosing(engine.draw(replace(DRAWING, steps=90))) as events:
        await anext(events)
    await eventually(lambda: {weight.device.type for part in networks for weight in part.parameters()} == {"meta"})
    assert (await drawn(engine, DRAWING))[1] == whole


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
