"""TeaCache on pipelines of public shapes."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engines.checkpoints import DEMO

from baton.errors import ConfigError
from services.engines.diffusion import Clip, ClipOptions, Drawing, Picture

if sys.version_info < (3, 11):
    pytest.skip("diffusers needs Python 3.11", allow_module_level=True)

import diffusers
import torch
from support.engines.pipelines import write_flux, write_latte, write_wan

from services.engines.diffusers.config import DiffusionConfig, TeaCacheConfig
from services.engines.diffusers.engine import DiffusersEngine
from services.engines.diffusers.tea_cache import TeaCache, polynomial
from services.engines.pytorch.parallel.ranks import OneRank

STEPS = 6
PICTURE = Drawing("a red circle", "", 4.0, 64, 64, STEPS, seed=1)


async def drawn(folder: Path, threshold: float | None, drawing: Drawing) -> tuple[Picture | Clip, int]:
    """Two drawings of the same, and the calls that were without blocks the second time."""
    cache: dict[str, Any] = {} if threshold is None else {"tea_cache": {"threshold": threshold}}
    config = DiffusionConfig(model=folder, device="cpu", threads=1, canary_seconds=None, width=64, height=64, **cache)
    async with DiffusersEngine(config) as engine:
        found = []
        for _ in range(2):
            before = engine.reused_calls
            found.append([event async for event in engine.draw(drawing)][-1])
        assert found[0] == found[1]
        assert isinstance(found[1], Picture | Clip)
        return found[1], engine.reused_calls - before


@pytest.mark.parametrize(("name", "calls"), [("latte", 1), ("wan", 2), ("flux", 1)])
async def test_it_leaves_out_all_steps_but_the_first_and_the_last_or_none_by_its_threshold(
    name: str, calls: int, tmp_path: Path
) -> None:
    folder = {"latte": write_latte, "wan": write_wan, "flux": write_flux}[name](tmp_path)
    plain, _ = await drawn(folder, None, PICTURE)
    never, of_never = await drawn(folder, 1e-9, PICTURE)
    always, of_always = await drawn(folder, 1e9, PICTURE)
    assert (of_never, of_always) == (0, (STEPS - 2) * calls)
    assert never == plain != always


async def test_a_clip_is_drawn_with_fewer_calls_whatever_the_blocks_do_with_its_frames(tmp_path: Path) -> None:
    folder = write_latte(tmp_path)
    clip = replace(PICTURE, clip=ClipOptions(frames=8, frames_per_second=8.0))
    plain, _ = await drawn(folder, 1e-9, clip)
    cached, reused = await drawn(folder, 1e9, clip)
    assert reused == STEPS - 2
    assert isinstance(plain, Clip)
    assert isinstance(cached, Clip)
    assert len(plain.frames) == len(cached.frames) == 8
    assert plain.frames != cached.frames


def test_what_is_kept_of_a_batch_is_freed_at_its_end(tmp_path: Path) -> None:
    pipeline = diffusers.WanPipeline.from_pretrained(write_wan(tmp_path))
    cache = TeaCache(pipeline.transformer, TeaCacheConfig(threshold=1.0), OneRank())
    cache.begin(steps=3)
    pipeline("a", height=32, width=32, num_frames=1, num_inference_steps=2, output_type="latent")
    assert cache._memories
    cache.end()
    assert not cache._memories
    assert cache._states is None


def test_a_transformer_that_it_does_not_know_is_named_with_the_field() -> None:
    unet = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"engine\.tea_cache: Linear is not supported; expected one of Flux"):
        TeaCache(unet, TeaCacheConfig(threshold=1.0), OneRank())


def test_the_polynomial_is_from_the_highest_power_down() -> None:
    assert polynomial((2.0, -1.0, 0.5), 3.0) == 2 * 9 - 3 + 0.5


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tea_cache": {"threshold": 0}}, "tea_cache.threshold"),
        ({"tea_cache": {"threshold": 1, "coefficients": []}}, "tea_cache.coefficients"),
        ({"tea_cache": {"threshold": 1}, "cpu_offload": "stream"}, "tea_cache: not with cpu_offload: stream"),
        ({"cpu_offload": "disk"}, "cpu_offload"),
        ({"data_parallel_size": 0}, "data_parallel_size"),
        ({"frames": 9, "max_frames": 8}, "max_frames"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_its_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        DiffusionConfig(model=DEMO.parent / "demo_diffusion", **options)
