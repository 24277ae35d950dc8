"""A checkpoint's diffusion pipeline: found by its class's name, loaded, and run on one batch of pictures."""

import inspect
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from PIL import Image

from baton.errors import ConfigError, EngineFailed
from services.engines.diffusers.config import DiffusionConfig
from services.engines.diffusion import Drawing
from services.engines.pytorch.model import checkpoint

_INDEX = "model_index.json"
_NEEDED = ("prompt", "num_inference_steps", "generator", "callback_on_step_end", "height", "width")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NETWORKS = ("transformer", "unet")

AfterStep = Callable[[int, Callable[[int], bytes]], None]
"""Called with the number of steps that are done, and a function that makes a preview of the picture of an index.

What it raises ends the batch.
"""


class Pipeline:
    """A loaded pipeline, on one thread. `default_size` and `has_previews` are known once it has been warmed up."""

    def __init__(self, config: DiffusionConfig, device: torch.device) -> None:
        self.device = device
        self.dtype = _dtype(config, device)
        found = pipeline_class(config.model)
        self.name = found.__name__
        try:
            loaded = found.from_pretrained(config.model, dtype=self.dtype, local_files_only=True)
        except (OSError, ValueError, TypeError, ImportError, AttributeError) as error:
            raise ConfigError(f"engine.model: {config.model} cannot be loaded by {self.name}: {error}") from error
        self._pipeline: Any = _placed(loaded, config, device)
        self._pipeline.set_progress_bar_config(disable=True)
        self._takes = frozenset(inspect.signature(found.__call__).parameters)
        self.default_size = (config.width, config.height)
        self.has_previews = False

    @property
    def network(self) -> torch.nn.Module:
        """The network that removes noise."""
        found: torch.nn.Module = next(
            part for name in _NETWORKS if (part := getattr(self._pipeline, name, None)) is not None
        )
        return found

    @property
    def has_negative_prompts(self) -> bool:
        """True if it can be told what a picture is not to show."""
        return "negative_prompt" in self._takes

    def warm_up(self, steps: int, guidance_scale: float) -> None:
        """Draws a picture of the default size."""
        width, height = self.default_size
        drawing = Drawing("", "", guidance_scale, width, height, steps, seed=0)
        (image,) = self._run([drawing], self._learn_of_latents, has_size=bool(width and height))
        self.default_size = image.size

    def draw(self, drawings: Sequence[Drawing], after_step: AfterStep) -> list[bytes]:
        """Returns the pictures as PNGs. All drawings have the same size, steps and guidance scale."""

        def ended(_pipeline: object, step: int, _time: object, tensors: dict[str, Any]) -> dict[str, Any]:
            after_step(step + 1, lambda index: self._preview(tensors["latents"][index : index + 1]))
            return {}

        return [png(image) for image in self._run(drawings, ended, has_size=True)]

    def free(self) -> None:
        """Gives the memory of an ended batch back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, drawings: Sequence[Drawing], ended: Callable[..., Any], *, has_size: bool) -> list[Image.Image]:
        first = drawings[0]
        options: dict[str, Any] = {"width": first.width, "height": first.height} if has_size else {}
        if "guidance_scale" in self._takes:
            options["guidance_scale"] = first.guidance_scale
        if self.has_negative_prompts:
            options["negative_prompt"] = [one.negative_prompt for one in drawings]
        # On the processor, so that the noise is the same on every device.
        seeds = [torch.Generator("cpu").manual_seed(one.seed) for one in drawings]
        images: list[Image.Image] = self._pipeline(
            [one.prompt for one in drawings],
            num_inference_steps=first.steps,
            generator=seeds,
            callback_on_step_end=ended,
            **options,
        ).images
        if len(images) != len(drawings):
            raise EngineFailed(f"{self.name} drew {len(images)} pictures of {len(drawings)}")
        return images

    def _learn_of_latents(
        self, _pipeline: object, _step: int, _time: object, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        has_decoder = isinstance(getattr(self._pipeline, "vae", None), diffusers.AutoencoderKL)
        self.has_previews = has_decoder and tensors["latents"].ndim == 4
        return {}

    def _preview(self, latents: torch.Tensor) -> bytes:
        decoder = self._pipeline.vae
        shift = getattr(decoder.config, "shift_factor", None) or 0.0
        pixels = decoder.decode(latents / decoder.config.scaling_factor + shift).sample
        return png(self._pipeline.image_processor.postprocess(pixels)[0])


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


def fingerprint(folder: Path) -> str:
    """Those of all parts that have a configuration, joined."""
    parts = sorted(path.parent for path in folder.glob("*/config.json"))
    return ",".join(f"{part.name}:{checkpoint.fingerprint(part)}" for part in parts)


def png(image: Image.Image) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def _dtype(config: DiffusionConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[config.dtype]


def _placed(pipeline: Any, config: DiffusionConfig, device: torch.device) -> Any:
    if config.cpu_offload != "none" and device.type == "cpu":
        raise ConfigError("engine.cpu_offload: needs a GPU")
    match config.cpu_offload:
        case "model":
            pipeline.enable_model_cpu_offload(device=device)
        case "sequential":
            pipeline.enable_sequential_cpu_offload(device=device)
        case _:
            pipeline.to(device)
    return pipeline
