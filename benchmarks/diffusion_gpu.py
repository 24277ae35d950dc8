"""Times a pipeline of Wan 2.1's 1.3B shape with random weights on a GPU: plain diffusers, then Baton's engine, with
TeaCache and with each way to offload. Its quality means nothing; its sizes and times do.

    python -m benchmarks.diffusion_gpu build /tmp/wan
    python -m benchmarks.diffusion_gpu measure /tmp/wan
    python -m benchmarks.diffusion_gpu measure /tmp/wan --only sequential
    python -m benchmarks.diffusion_gpu replicas /tmp/wan    # on several GPUs
"""

import argparse
import asyncio
import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from models.demo_diffusion.architecture import WORDS, new_tokenizer
from services.engines.diffusers.config import DiffusionConfig, TeaCacheConfig
from services.engines.diffusers.engine import DiffusersEngine
from services.engines.diffusers.replicas import ReplicatedEngine
from services.engines.diffusers.tea_cache import TeaCache
from services.engines.diffusion import Clip, ClipOptions, Diffuser, Drawing
from services.engines.pytorch.parallel.ranks import OneRank

STEPS, FEW_STEPS = 12, 4
DRAWING = Drawing("a red circle", "", 5.0, 832, 480, STEPS, seed=1, clip=ClipOptions(frames=9, frames_per_second=8.0))
THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
_TEXT_WIDTH = 4096


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration of the engine, and the steps that are drawn with it."""

    name: str
    options: dict[str, Any]
    steps: int = STEPS


CASES = (
    Case("Baton", {}),
    Case("Baton, TeaCache, threshold 2", {"tea_cache": {"threshold": 2.0}}),
    Case("Baton, cpu_offload: model", {"cpu_offload": "model"}),
    Case("Baton, cpu_offload: stream", {"cpu_offload": "stream"}),
    Case("Baton, cpu_offload: sequential", {"cpu_offload": "sequential"}, FEW_STEPS),
)


def built() -> WanPipeline:
    """The pipeline, in bfloat16 on the GPU."""
    with torch.device("cuda"):
        # The shape of Wan-AI/Wan2.1-T2V-1.3B.
        transformer = WanTransformer3DModel(num_attention_heads=12, ffn_dim=8960, num_layers=30, text_dim=_TEXT_WIDTH)
        vae = AutoencoderKLWan()
        # Two layers of UMT5-XXL's 24.
        text = UMT5Config(
            vocab_size=len(WORDS), d_model=_TEXT_WIDTH, d_kv=64, d_ff=10240, num_heads=64, num_layers=2, pad_token_id=0
        )
        encoder = UMT5EncoderModel(text)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return WanPipeline(new_tokenizer(), encoder, vae, scheduler, transformer).to(torch.bfloat16)


def build(folder: Path) -> None:
    """Writes the pipeline."""
    built().save_pretrained(folder)


@torch.inference_mode()
def tea_cache() -> None:
    """Draws latents by one pipeline without a cache, then with several thresholds."""
    pipeline = built().to("cuda")
    pipeline.set_progress_bar_config(disable=True)
    draw_plain(pipeline, lambda *_: {}, output_type="latent")
    print(f"{torch.cuda.get_device_name()}, {DRAWING.width} x {DRAWING.height}, {DRAWING.frames} frames, {STEPS} steps")
    print("| threshold | s a step | calls without blocks |\n|---|---|---|", flush=True)
    original = pipeline.transformer
    for threshold in (None, *THRESHOLDS):
        pipeline.transformer = copy.deepcopy(original)
        cache = TeaCache(pipeline.transformer, TeaCacheConfig(threshold=threshold), OneRank()) if threshold else None
        began = time.monotonic()
        if cache:
            cache.begin(STEPS)
        draw_plain(
            pipeline, lambda *_, cache=cache: (cache.next_step() if cache else None, {})[1], output_type="latent"
        )
        torch.cuda.synchronize()
        seconds = (time.monotonic() - began) / STEPS
        print(f"| {threshold} | {seconds:.4f} | {cache.reused if cache else 0} of {2 * STEPS} |", flush=True)


def draw_plain(pipeline: WanPipeline, ended: Callable[..., Any], output_type: str = "pil") -> None:
    """Draws by diffusers alone."""
    pipeline(
        DRAWING.prompt,
        negative_prompt="",
        width=DRAWING.width,
        height=DRAWING.height,
        num_frames=DRAWING.frames,
        guidance_scale=DRAWING.guidance_scale,
        num_inference_steps=STEPS,
        generator=torch.Generator("cpu").manual_seed(1),
        callback_on_step_end=ended,
        output_type=output_type,
    )


class Meter:
    """Seconds from step to step, and the device's memory."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._times = [time.monotonic()]

    def step(self) -> None:
        """Counts a step that has ended."""
        torch.cuda.synchronize()
        self._times.append(time.monotonic())

    def row(self, name: str, seconds: float) -> str:
        """A line of the table; the first step and what comes after the last one do not count as steps."""
        steps = [after - before for before, after in zip(self._times[1:], self._times[2:], strict=False)]
        peak, kept = torch.cuda.max_memory_allocated() / 1e9, torch.cuda.memory_allocated() / 1e9
        mean, median = statistics.mean(steps), statistics.median(steps)
        return f"| {name} | {len(steps) + 1} | {mean:.4f} | {median:.4f} | {seconds:.2f} | {peak:.2f} | {kept:.2f} |"


def plain(folder: Path) -> None:
    """Draws by diffusers alone."""
    pipeline = WanPipeline.from_pretrained(folder, dtype=torch.bfloat16).to("cuda")
    pipeline.set_progress_bar_config(disable=True)

    draw_plain(pipeline, lambda *_: {})
    for name in ("diffusers", "diffusers again"):
        meter = Meter()

        def ended(*_: Any, meter: Meter = meter) -> dict[str, Any]:
            meter.step()
            return {}

        began = time.monotonic()
        draw_plain(pipeline, ended)
        print(meter.row(name, time.monotonic() - began), flush=True)


async def with_baton(folder: Path, case: Case) -> None:
    """Draws by Baton's engine, twice with everything warm, then cancels one after two steps, and closes the engine."""
    config = DiffusionConfig(
        model=folder, device="cuda", canary_seconds=None, width=832, height=480, max_frames=81, **case.options
    )
    drawing = replace(DRAWING, steps=case.steps)
    async with DiffusersEngine(config) as engine:
        async for _ in engine.draw(replace(drawing, steps=2)):
            pass
        calls, meter, measured = engine.reused_calls, Meter(), engine._pipeline._counting

        def counting(ended: Callable[..., Any]) -> Callable[..., Any]:
            wrapped = measured(ended)

            def timed(*arguments: Any) -> Any:
                meter.step()
                return wrapped(*arguments)

            return timed

        engine._pipeline._counting = counting  # type: ignore[method-assign]
        began = time.monotonic()
        async for _ in engine.draw(drawing):
            pass
        print(meter.row(case.name, time.monotonic() - began), flush=True)
        if engine.reused_calls:
            print(f"{engine.reused_calls - calls} of {2 * case.steps} calls reused", flush=True)
        before = engine.steps
        async with aclosing(engine.draw(drawing)) as events:
            await anext(events)
            await anext(events)
        async for _ in engine.draw(replace(drawing, steps=1)):  # the thread is free again
            pass
        kept = torch.cuda.memory_allocated() / 1e9
        print(f"cancelled after 2 steps: {engine.steps - before - 1} were computed, {kept:.2f} GB stay", flush=True)


def measure(folder: Path, only: str) -> None:
    """Prints a table, with a text of only those cases that have it in their name, and without diffusers alone."""
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors")) / 1e9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, weights {size:.2f} GB", flush=True)
    print(f"{DRAWING.width} x {DRAWING.height}, {DRAWING.frames} frames, guidance", flush=True)
    print("| | steps | mean s a step | median | whole s | peak GB | GB after it |\n|---|---|---|---|---|---|---|")
    if not only:
        plain(folder)
    for case in [case for case in CASES if only in case.name]:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated() / 1e9
        try:
            asyncio.run(with_baton(folder, case))
        except Exception as error:
            print(f"{case.name}: {error!r}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        after = torch.cuda.memory_allocated() / 1e9
        print(f"engine closed: {before:.2f} GB before, {after:.2f} GB after", flush=True)


async def replicas(folder: Path) -> None:
    """Draws the same clips by one GPU and by a copy on each, all at once; then all but one are cancelled."""
    gpus = torch.cuda.device_count()
    drawings = [replace(DRAWING, seed=seed) for seed in range(2 * gpus)]
    print(f"{gpus} x {torch.cuda.get_device_name()}, {len(drawings)} clips of {STEPS} steps at once", flush=True)
    print("| data_parallel_size | s for all | GB on each GPU | bytes |\n|---|---|---|---|", flush=True)
    files: list[set[Clip]] = []
    for size in (1, gpus):
        config = DiffusionConfig(
            model=folder, device="cuda", canary_seconds=None, width=832, height=480, data_parallel_size=size
        )
        opened = ReplicatedEngine(config) if size > 1 else DiffusersEngine(config)
        async with opened as engine:
            await asyncio.gather(*[_clip(engine, replace(DRAWING, steps=2)) for _ in range(size)])
            began = time.monotonic()
            files.append(set(await asyncio.gather(*[_clip(engine, drawing) for drawing in drawings])))
            seconds = time.monotonic() - began
            print(f"| {size} | {seconds:.2f} | {_gigabytes(gpus)} | {_equal(files)} |", flush=True)
            if size > 1:
                await _cancel_all_but_one(engine, drawings)
                print(f"then cancelled, all but one: {_gigabytes(gpus)} GB, load {engine.load()}", flush=True)
        del opened, engine
        gc.collect()
        torch.cuda.empty_cache()
        print(f"closed: {_gigabytes(gpus)} GB", flush=True)


async def _clip(engine: Diffuser, drawing: Drawing) -> Clip:
    events = [event async for event in engine.draw(drawing)]
    assert isinstance(events[-1], Clip)
    return events[-1]


async def _cancel_all_but_one(engine: Diffuser, drawings: Sequence[Drawing]) -> None:
    tasks = [asyncio.create_task(_clip(engine, drawing)) for drawing in drawings]
    await asyncio.sleep(0.5)
    for task in tasks[1:]:
        task.cancel()
    await asyncio.wait(tasks)
    assert not tasks[0].cancelled()


def _gigabytes(gpus: int) -> str:
    return " and ".join(f"{torch.cuda.memory_allocated(gpu) / 1e9:.2f}" for gpu in range(gpus))


def _equal(files: Sequence[set[Clip]]) -> str:
    return "equal" if all(one == files[0] for one in files) else "**not equal**"


def main() -> None:
    """Does what the command says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "measure", "tea-cache", "replicas"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("/tmp/wan"))
    parser.add_argument("--only", default="", help="a text in the names of cases")
    arguments = parser.parse_args()
    match arguments.command:
        case "build":
            build(arguments.folder)
        case "measure":
            measure(arguments.folder, arguments.only)
        case "replicas":
            asyncio.run(replicas(arguments.folder))
        case _:
            tea_cache()


if __name__ == "__main__":
    main()
