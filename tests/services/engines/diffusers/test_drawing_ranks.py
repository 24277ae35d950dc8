"""Pictures and clips that two processes draw together: the bytes, refusals, cancellation, and the end of a rank."""

import asyncio
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from PIL import Image
from support.cluster.processes import process, ranks_of
from support.engines.forked_ranks import forked_ranks
from support.eventually import eventually
from support.freezing import freeze

from baton.errors import ConfigError, EngineFailed, InvalidRequest
from services.engines.diffusion import Clip, ClipOptions, Drawing, Picture, Step

if sys.version_info < (3, 11):
    pytest.skip("diffusers needs Python 3.11", allow_module_level=True)

import torch
from diffusers import FluxTransformer2DModel, LatteTransformer3DModel
from diffusers.models.attention_processor import Attention
from support.engines.pipelines import write_flux, write_latte, write_wan

from services.engines.diffusers.config import DiffusionConfig
from services.engines.diffusers.engine import DiffusersEngine
from services.engines.diffusers.split import split
from services.engines.pytorch.parallel.processes import RankProcesses
from services.engines.pytorch.parallel.ranks import OneRank
from services.engines.pytorch.parallel.shards import Shard

# Ranks load the libraries again, which takes long where many tests share two cores.
pytestmark = pytest.mark.timeout(300)

CHECKPOINT = Path(__file__).parents[4] / "models" / "demo_diffusion"
DRAWING = Drawing("a red circle", "", 5.0, 64, 64, steps=5, seed=4)
SECONDS = 90
READY_SECONDS = 200


@pytest.fixture
def forked() -> Iterator[None]:
    """For tests of what ranks do together. How they are started is left to the others."""
    with forked_ranks():
        yield


@asynccontextmanager
async def opened(folder: Path, size: int = 2, **options: Any) -> AsyncIterator[DiffusersEngine]:
    config = DiffusionConfig(
        model=folder,
        device="cpu",
        threads=1,
        canary_seconds=None,
        width=64,
        height=64,
        tensor_parallel_size=size,
        **options,
    )
    async with DiffusersEngine(config) as engine:
        yield engine


async def drawn(engine: DiffusersEngine, drawing: Drawing) -> Picture | Clip:
    last = [event async for event in engine.draw(drawing)][-1]
    assert isinstance(last, Picture | Clip)
    return last


def pixels(made: Picture | Clip) -> "numpy.ndarray[Any, Any]":
    files = (made.png,) if isinstance(made, Picture) else made.frames
    return numpy.stack([numpy.asarray(Image.open(io.BytesIO(file))).astype(int) for file in files])


def written(name: str, folder: Path) -> Path:
    writers = {"latte": write_latte, "wan": write_wan, "flux": write_flux}
    return writers[name](folder) if name in writers else CHECKPOINT


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "frames", "layer"),
    [
        ("demo", 1, "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"),
        ("wan", 5, "blocks.0.attn1.to_q"),
        ("latte", 8, "transformer_blocks.0.ff.net.0.proj"),
        ("flux", 1, "single_transformer_blocks.0.proj_mlp"),
    ],
)
async def test_two_ranks_with_half_of_the_weights_each_draw_what_one_draws(
    name: str, frames: int, layer: str, tmp_path: Path
) -> None:
    folder = written(name, tmp_path)
    drawing = DRAWING if frames == 1 else replace(DRAWING, clip=ClipOptions(frames, 8.0))
    found = []
    for size in (1, 2):
        async with opened(folder, size) as engine:
            first, again = [await drawn(engine, drawing) for _ in range(2)]
            assert first == again
            rows = engine._pipeline.network.get_submodule(layer).weight.shape[0]
            found.append((pixels(first), rows))
    (one, all_rows), (two, half) = found
    assert half * 2 == all_rows
    assert abs(one - two).max() <= 1  # of 255, in float32: sums are rounded in another order
    assert one.std() > 1


@pytest.mark.usefixtures("forked")
async def test_tea_cache_leaves_out_the_same_steps_on_all_ranks(tmp_path: Path) -> None:
    async with opened(write_wan(tmp_path), tea_cache={"threshold": 1e9}) as engine:
        before = engine.reused_calls
        await drawn(engine, DRAWING)
        assert engine.reused_calls - before == (DRAWING.steps - 2) * 2


@pytest.mark.usefixtures("forked")
async def test_ranks_stay_together_through_refusals_and_cancellation_until_one_is_killed(tmp_path: Path) -> None:
    async with opened(write_latte(tmp_path)) as engine:
        whole = await drawn(engine, DRAWING)

        with pytest.raises(InvalidRequest, match="LattePipeline cannot draw this"):
            await drawn(engine, replace(DRAWING, width=60))  # by the pipeline, before it computes
        with pytest.raises(InvalidRequest, match="LattePipeline cannot draw this"):
            await drawn(engine, replace(DRAWING, clip=ClipOptions(5, 8.0)))  # by the network, on each rank

        before = engine.steps
        async with aclosing(engine.draw(replace(DRAWING, steps=90, preview_steps=1))) as events:
            event = await anext(events)
            assert isinstance(event, Step)
            assert event.preview
        await eventually(lambda: engine.load().running == 0, SECONDS)
        assert await drawn(engine, DRAWING) == whole
        assert engine.steps - before <= 3 + DRAWING.steps

        running = asyncio.create_task(drawn(engine, replace(DRAWING, steps=900)))
        await eventually(lambda: engine.load().running == 1, SECONDS)
        [follower] = multiprocessing.active_children()
        follower.kill()
        with pytest.raises(EngineFailed, match="rank"):
            await running
        await eventually(lambda: not engine.healthy, SECONDS)
        with pytest.raises(EngineFailed, match="rank"):
            await drawn(engine, DRAWING)
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("forked")
async def test_two_ranks_draw_batches(tmp_path: Path) -> None:
    async with opened(write_wan(tmp_path), max_batch=2) as engine:
        alone = await drawn(engine, DRAWING)
        together = await asyncio.gather(*(drawn(engine, replace(DRAWING, seed=seed)) for seed in (4, 5)))
        assert abs(pixels(together[0]) - pixels(alone)).max() <= 1


async def test_a_rank_that_is_killed_while_nothing_is_drawn_fails_the_engine() -> None:
    async with opened(CHECKPOINT) as engine:
        assert engine.healthy
        [follower] = ranks_of(os.getpid())
        follower.kill()
        await eventually(lambda: not engine.healthy, SECONDS)
        with pytest.raises(EngineFailed, match="rank 1 of the engine has ended"):
            await drawn(engine, DRAWING)


@pytest.mark.usefixtures("forked")
async def test_a_rank_that_hangs_is_noticed_and_is_ended_with_the_engine() -> None:
    async with opened(CHECKPOINT, stall_seconds=3) as engine:
        [follower] = multiprocessing.active_children()
        assert follower.pid
        running = asyncio.create_task(drawn(engine, replace(DRAWING, steps=900)))
        await eventually(lambda: engine.load().running == 1, SECONDS)
        freeze(follower.pid)
        await eventually(lambda: not engine.healthy, SECONDS)
        follower.kill()
        with pytest.raises(EngineFailed, match="rank"):
            await running


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["rank 1", "rank 0", "none"])
async def test_a_worker_of_two_ranks_ends_with_the_code_that_says_why_and_leaves_no_process(
    lost: str, tmp_path: Path
) -> None:
    options = ["registry.kind=memory", "metrics_listen=''", f"engine.model={CHECKPOINT}", "engine.device=cpu"]
    more = ["engine.threads=1", "engine.tensor_parallel_size=2"]
    with process("services", "diffuse.yaml", [*options, *more], tmp_path / "worker.log") as started:
        await eventually(lambda: "worker ready" in started.log.read_text(), READY_SECONDS)
        [follower] = ranks_of(started.popen.pid)
        for each in (signal.SIGTERM, signal.SIGINT):
            follower.send_signal(each)  # as a whole process group gets them
        match lost:
            case "rank 1":
                follower.kill()
                assert await asyncio.to_thread(started.popen.wait, SECONDS) == 1
                assert "a rank of the engine has ended" in started.log.read_text()
            case "rank 0":
                started.kill()
            case "none":
                assert await asyncio.to_thread(started.terminate, SECONDS) == 0
        _, alive = await asyncio.to_thread(psutil.wait_procs, [follower], SECONDS)
        assert not alive


class Network(torch.nn.Module):
    """One attention, `attn`, and no plan of its class."""

    _tp_plan = None

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn = Attention(query_dim=24, heads=6, dim_head=4, **options)


@pytest.mark.parametrize(
    ("size", "options", "reason"),
    [
        (4, {}, r"the 6 heads of attn cannot be divided by 4"),
        (2, {"qk_norm": "layer_norm_across_heads", "kv_heads": 6}, r"attn\.norm_q cannot be split: LayerNorm"),
        (2, {"qk_norm": "l2"}, r"attn\.norm_q cannot be split: LpNorm"),
        (2, {"kv_heads": 2}, r"attn\.to_k cannot be split: Linear"),
        (2, {"pre_only": True}, r"attn cannot be split: it has no to_out"),
        (2, {"only_cross_attention": True, "added_kv_proj_dim": 8}, r"attn cannot be split: it has no to_k"),
    ],
)
def test_an_attention_that_cannot_be_split_is_refused_by_its_name(
    size: int, options: dict[str, Any], reason: str
) -> None:
    network = Network(**options)
    before = {name: weight.shape for name, weight in network.named_parameters()}
    with pytest.raises(ConfigError, match=rf"engine\.tensor_parallel_size: {reason}"):
        split(network, Shard(0, size), OneRank())
    assert {name: weight.shape for name, weight in network.named_parameters()} == before


def test_a_module_of_an_attention_that_is_not_known_is_refused_by_its_name() -> None:
    network = Network()
    network.attn.to_gate = torch.nn.Linear(24, 6)
    with pytest.raises(ConfigError, match=r"attn\.to_gate cannot be split: Linear"):
        split(network, Shard(0, 2), OneRank())


def test_networks_whose_layers_cannot_be_divided_are_refused() -> None:
    flux = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2
    )
    latte = LatteTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=1,
        sample_size=8,
        patch_size=2,
        cross_attention_dim=16,
        caption_channels=16,
        norm_type="ada_norm_single",
    )
    plain = torch.nn.Linear(4, 4)
    plain._tp_plan = None  # type: ignore[assignment]
    refusals: Sequence[tuple[torch.nn.Module, str]] = [
        (flux, "its 2 heads cannot be divided by 3"),
        (latte, r"the 2 heads of transformer_blocks\.0\.attn1 cannot be divided by 3"),
        (plain, "Linear has no attention that can be split"),
    ]
    for network, reason in refusals:
        with pytest.raises(ConfigError, match=reason):
            split(network, Shard(0, 3), OneRank())


async def test_a_model_that_cannot_be_split_is_refused_before_a_rank_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[object] = []
    monkeypatch.setattr(RankProcesses, "_start", lambda *arguments: started.append(arguments))
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size: the 4 heads of .* cannot be divided by 3"):
        async with opened(CHECKPOINT, size=3):
            pass
    assert not started


def test_a_sum_over_heads_of_all_ranks_is_that_of_the_whole_norm() -> None:
    """Each half alone, with the other half's squares added, gives its columns of the whole."""
    torch.manual_seed(0)
    network = Network(qk_norm="rms_norm_across_heads", kv_heads=6)
    states = torch.randn(3, 5, 24)
    norm: Any = network.attn.norm_q
    norm.weight.data = torch.randn(24)
    whole = norm(states)

    class Other(OneRank):
        def __init__(self, rest: torch.Tensor) -> None:
            self.rest = rest

        def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor + self.rest.square().sum(-1, keepdim=True)

    for rank, columns in enumerate((slice(0, 12), slice(12, 24))):
        network = Network(qk_norm="rms_norm_across_heads", kv_heads=6)
        network.attn.norm_q.weight.data = norm.weight.data
        rest = states[..., 12:] if rank == 0 else states[..., :12]
        split(network, Shard(rank, 2), Other(rest))
        part = network.attn.norm_q(states[..., columns])
        assert torch.allclose(part, whole[..., columns], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"tensor_parallel_size": 65}, "tensor_parallel_size"),
        ({"data_parallel_size": 2}, "tensor_parallel_size: not with data_parallel_size"),
        ({"cpu_offload": "model"}, "tensor_parallel_size: not with cpu_offload"),
        ({"device": "cuda:1"}, "tensor_parallel_size: cuda:1 is one GPU"),
    ],
)
def test_a_configuration_that_ranks_cannot_have_is_refused_by_its_field(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DiffusionConfig(model=CHECKPOINT, **({"tensor_parallel_size": 2} | options))
