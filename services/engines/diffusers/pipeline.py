"""A checkpoint's diffusion pipeline: found by its class's name, loaded, and run on one batch of pictures or clips."""

import inspect
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import diffusers
import numpy
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from baton.errors import ConfigError
from services.engines.diffusers.config import DiffusionConfig
from services.engines.diffusers.ranks import Group
from services.engines.diffusers.split import planned, split
from services.engines.diffusers.tea_cache import TeaCache
from services.engines.diffusion import Clip, Drawing, Picture
from services.engines.pytorch.model import checkpoint

HAS_MP4 = find_spec("av") is not None
"""True if PyAV, of the extra `diffusion`, is installed."""

_QUALITY = "18"  # x264's constant rate factor, at which compression is hardly seen
_FINEST_RATE = 1000  # of frames per second, as the largest denominator of a fraction
_INDEX = "model_index.json"
_NEEDED = ("prompt", "num_inference_steps", "generator", "callback_on_step_end", "height", "width")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NETWORKS = ("transformer", "unet", "transformer_2")
_OTHER_PROMPT = "a red circle and a blue square"  # of another length
_MOST_DIFFERENT = 4.0  # of 255, on average: more than the rounding of two steps
_FRAMES = ("num_frames", "video_length")
_FRAME_MULTIPLES = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")

AfterStep = Callable[[int, Callable[[int], bytes]], None]
"""Called with the number of steps that are done, and a function that makes a preview of the picture of an index.

What it raises ends the batch.
"""


def written(drawing: Drawing, frames: Sequence[Image.Image]) -> Picture | Clip:
    """The drawing's files."""
    width, height = frames[0].size
    if drawing.clip is None:
        return Picture(png(frames[0]), width, height)
    if drawing.clip.is_mp4:
        return Clip(mp4(frames, drawing.clip.frames_per_second), (), width, height)
    return Clip(b"", tuple(png(frame) for frame in frames), width, height)


def png(image: Image.Image) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def mp4(frames: Sequence[Image.Image], frames_per_second: float) -> bytes:
    """The clip as H.264, of one thread, so that the same frames give the same bytes. Raises ValueError if the encoder
    refuses them, as it does an odd width or height.
    """
    import av

    file = io.BytesIO()
    try:
        with av.open(file, "w", format="mp4") as container:
            stream = container.add_stream("libx264", Fraction(frames_per_second).limit_denominator(_FINEST_RATE))
            stream.width, stream.height = frames[0].size
            stream.pix_fmt = "yuv420p"
            stream.thread_count = 1
            stream.options = {"crf": _QUALITY}
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(numpy.asarray(frame), "rgb24")))
            container.mux(stream.encode())
    except av.FFmpegError as error:
        raise ValueError(f"the frames cannot be written as MP4: {error}") from error
    return file.getvalue()


class Pipeline:
    """A loaded pipeline, on one thread. `default_size` and `has_previews` are known once it has been warmed up.

    Each rank of a group that draws together has one.
    """

    def __init__(self, config: DiffusionConfig, device: torch.device, group: Group) -> None:
        self.device = device
        self._group = group
        self.dtype = _dtype(config, device)
        found = pipeline_class(config.model)
        self.name = found.__name__
        try:
            loaded = found.from_pretrained(config.model, dtype=self.dtype, local_files_only=True)
        except (OSError, ValueError, TypeError, ImportError, AttributeError) as error:
            raise ConfigError(f"engine.model: {config.model} cannot be loaded by {self.name}: {error}") from error
        self._pipeline: Any = loaded
        ranks = group.join(device)
        if group.shard.size > 1:
            for network in self._networks():
                split(network, group.shard, ranks)
        self._tea_cache = TeaCache(self.network, config.tea_cache, ranks) if config.tea_cache else None
        _place(loaded, config, device)
        loaded.set_progress_bar_config(disable=True)
        self._takes = frozenset(inspect.signature(found.__call__).parameters)
        self._frames = next((name for name in _FRAMES if name in self._takes), None)
        self.default_size = (config.width, config.height) if config.width and config.height else self._trained_size()
        self.has_previews = False

    @property
    def network(self) -> torch.nn.Module:
        """The network that removes noise."""
        return next(self._networks())

    def _networks(self) -> Iterator[torch.nn.Module]:
        """A second one, of some pipelines, draws the last steps."""
        found = (getattr(self._pipeline, name, None) for name in _NETWORKS)
        return (network for network in found if network is not None)

    @property
    def has_negative_prompts(self) -> bool:
        """True if it can be told what a picture is not to show."""
        return "negative_prompt" in self._takes

    @property
    def has_clips(self) -> bool:
        """True if it can draw several frames; a picture is then a clip of one."""
        return self._frames is not None

    @property
    def frame_multiple(self) -> int:
        """The number of frames is 1 more than a multiple of it."""
        found = (getattr(self._pipeline, name, None) for name in _FRAME_MULTIPLES)
        return next((multiple for multiple in found if isinstance(multiple, int)), 1)

    @property
    def reused_calls(self) -> int:
        """The calls of the network so far, of which TeaCache left out the blocks."""
        return self._tea_cache.reused if self._tea_cache else 0

    def warm_up(self, steps: int, guidance_scale: float, max_batch: int) -> None:
        """Draws a picture of the default size. Raises ConfigError if it would be another one in a batch."""
        width, height = self.default_size
        drawing = Drawing("", "", guidance_scale, width, height, steps, seed=0)
        [alone] = self._test([drawing])
        self.default_size = alone.size
        if max_batch > 1:
            together, _ = self._test([drawing, replace(drawing, prompt=_OTHER_PROMPT, seed=1)])
            difference = numpy.abs(numpy.asarray(alone, float) - numpy.asarray(together, float)).mean()
            if difference > _MOST_DIFFERENT:
                raise ConfigError(f"engine.max_batch: must be 1, since {self.name} draws other pictures in a batch")

    def _test(self, drawings: Sequence[Drawing]) -> list[Image.Image]:
        with self._group.drawing(drawings):
            return [image for (image,) in self._run(drawings, self._learn_of_latents)]

    def draw(self, drawings: Sequence[Drawing], after_step: AfterStep) -> list[Picture | Clip]:
        """Returns the files. All drawings have the same size, frames, steps and guidance scale."""

        def ended(_pipeline: object, step: int, _time: object, tensors: dict[str, Any]) -> dict[str, Any]:
            with self._group.step():
                after_step(step + 1, lambda index: self._preview(tensors["latents"][index : index + 1]))
            return {}

        with self._group.drawing(drawings):
            drawn = self._run(drawings, ended)
        return [written(drawing, frames) for drawing, frames in zip(drawings, drawn, strict=True)]

    def follow(self, drawings: Sequence[Drawing]) -> None:
        """Draws what rank 0 of the group draws, for its part in it."""
        with self._group.drawing(drawings):
            self._run(drawings, self._follow_step)
        self.free()

    def _follow_step(self, *_: object) -> dict[str, Any]:
        with self._group.step():
            return {}

    def free(self) -> None:
        """Gives the memory of an ended batch back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _trained_size(self) -> tuple[int, int]:
        """0 where the network does not say it; then the pipeline's own default counts."""
        side = getattr(self.network.config, "sample_size", None)
        scale = getattr(self._pipeline, "vae_scale_factor", None)
        return (side * scale,) * 2 if isinstance(side, int) and isinstance(scale, int) else (0, 0)

    def _run(self, drawings: Sequence[Drawing], ended: Callable[..., Any]) -> list[list[Image.Image]]:
        """The frames of each drawing. However it ends, nothing but the weights stays on the device, and of those that
        are offloaded none.
        """
        steps = drawings[0].steps
        if self._tea_cache is not None:
            self._tea_cache.begin(steps)
        is_done = False
        try:
            made = self._pipeline(
                [one.prompt for one in drawings],
                num_inference_steps=steps,
                # On the processor, so that the noise is the same on every device.
                generator=[torch.Generator("cpu").manual_seed(one.seed) for one in drawings],
                callback_on_step_end=self._counting(ended),
                **self._options(drawings),
            )
            is_done = True
        finally:
            if self._tea_cache is not None:
                self._tea_cache.end()
            if not is_done:
                self._pipeline.maybe_free_model_hooks()
        drawn: list[list[Image.Image]] = [[image] for image in made.images] if self._frames is None else made.frames
        wanted = [one.frames for one in drawings]
        if (found := [len(frames) for frames in drawn]) != wanted:
            raise ValueError(f"it makes {found} frames where {wanted} are asked for")
        return drawn

    def _options(self, drawings: Sequence[Drawing]) -> dict[str, Any]:
        """Of the pipeline's call, those that it takes."""
        first = drawings[0]
        options: dict[str, Any] = {"width": first.width, "height": first.height} if first.width else {}
        wanted = {
            "guidance_scale": first.guidance_scale,
            "negative_prompt": [one.negative_prompt for one in drawings],
            "output_type": "pil",
            "clean_caption": False,  # of the prompts, by packages for web pages
            **({self._frames: first.frames} if self._frames else {}),
        }
        return options | {name: value for name, value in wanted.items() if name in self._takes}

    def _counting(self, ended: Callable[..., Any]) -> Callable[..., Any]:
        if (cache := self._tea_cache) is None:
            return ended

        def ended_and_counted(*arguments: Any) -> Any:
            cache.next_step()
            return ended(*arguments)

        return ended_and_counted

    def _learn_of_latents(
        self, _pipeline: object, _step: int, _time: object, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        has_decoder = isinstance(getattr(self._pipeline, "vae", None), diffusers.AutoencoderKL)
        self.has_previews = has_decoder and tensors["latents"].ndim == (4 if self._frames is None else 5)
        return self._follow_step()

    def _preview(self, latents: torch.Tensor) -> bytes:
        """The picture, or the first frame."""
        latents, decoder = latents if latents.ndim == 4 else latents[:, :, 0], self._pipeline.vae
        shift = getattr(decoder.config, "shift_factor", None) or 0.0
        pixels = decoder.decode(latents / decoder.config.scaling_factor + shift).sample
        return png(VaeImageProcessor().postprocess(pixels)[0])


def pipeline_class(folder: Path) -> Any:
    """The class that a checkpoint names, whose module alone is imported. Raises ConfigError naming it if it is unknown,
    or draws in another way.
    """
    try:
        name = json.loads((folder / _INDEX).read_bytes())["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"engine.model: {folder / _INDEX} does not name a class: {error!r}") from error
    if not isinstance(name, str):
        raise ConfigError(f"engine.model: {name!r} is code of the checkpoint's own, which is not run")
    # A name that is not diffusers' own could be any of its modules' attributes.
    found = getattr(diffusers, name, None) if name.endswith("Pipeline") else None
    if not inspect.isclass(found) or not issubclass(found, diffusers.DiffusionPipeline):
        raise ConfigError(f"engine.model: diffusers {diffusers.__version__} has no pipeline {name!r}")
    missing = [one for one in _NEEDED if one not in inspect.signature(found.__call__).parameters]
    if missing:
        raise ConfigError(f"engine.model: {name} is not supported, since it takes no {', '.join(missing)}")
    return found


def check_split(folder: Path, size: int) -> None:
    """Raises ConfigError for a checkpoint whose networks cannot be split, by their configurations alone."""
    index = json.loads((folder / _INDEX).read_bytes())
    for name in _NETWORKS:
        match index.get(name):
            case ["diffusers", str(class_name)] if (network := _without_weights(folder / name, class_name)) is not None:
                planned(network, size)


def _without_weights(folder: Path, class_name: str) -> Any:
    """A network of which only the shapes are known; None for what is not made so, which is left to its loading."""
    found = getattr(diffusers, class_name, None)
    try:
        with torch.device("meta"):
            return found.from_config(found.load_config(folder, local_files_only=True)) if found else None
    except (OSError, ValueError, TypeError, LookupError, ImportError, AttributeError, RuntimeError):
        return None


def fingerprint(folder: Path) -> str:
    """Those of all parts that have a configuration, joined."""
    parts = sorted(path.parent for path in folder.glob("*/config.json"))
    return ",".join(f"{part.name}:{checkpoint.fingerprint(part)}" for part in parts)


def _dtype(config: DiffusionConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[config.dtype]


def _place(pipeline: Any, config: DiffusionConfig, device: torch.device) -> None:
    if config.cpu_offload != "none" and device.type == "cpu":
        raise ConfigError("engine.cpu_offload: needs a GPU")
    match config.cpu_offload:
        case "model":
            pipeline.enable_model_cpu_offload(device=device)
        case "sequential":
            pipeline.enable_sequential_cpu_offload(device=device)
        case "stream":
            pipeline.enable_group_offload(device, offload_type="leaf_level", use_stream=True)
        case _:
            pipeline.to(device)
