"""The configuration of the diffusers engine. Importable without torch and diffusers."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from runtime.config import Section
from services.engines.context import EngineConfig


class TeaCacheConfig(Section):
    """Leaves out most of a step's work where its input has hardly changed since the last one."""

    threshold: float = Field(gt=0, description="Of the added up changes since a step was computed whole.")
    coefficients: tuple[float, ...] = Field(
        default=(1.0, 0.0),
        min_length=1,
        max_length=10,
        description="Of the polynomial that rescales a change, from the highest power down; published for many models.",
    )


class DiffusionConfig(EngineConfig):
    """A pipeline in a folder, the defaults of what it draws, and limits. Nothing is ever downloaded."""

    kind: Literal["diffusers"] = "diffusers"
    model: Path = Field(description="A folder with model_index.json, in diffusers' layout.")
    name: str = Field(default="", description="The name under which the model is served; the folder's name if empty.")
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto", description="auto: float32 on a processor, bfloat16 on a GPU."
    )
    threads: int | None = Field(default=None, ge=1, description="Of PyTorch, on a processor.")
    cpu_offload: Literal["none", "model", "sequential", "stream"] = Field(
        default="none",
        description="Keeps parts in the host's memory while they are not used: models; layers; or layers that are "
        "copied while others are computed.",
    )
    tea_cache: TeaCacheConfig | None = None
    data_parallel_size: int = Field(
        default=1, ge=1, le=64, description="GPUs with a copy of the pipeline each, from the first one on."
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, le=64, description="Processes, with a GPU each, that draw each picture together."
    )
    width: int = Field(default=0, ge=0, description="Where a request has none; 0 is the pipeline's own.")
    height: int = Field(default=0, ge=0)
    steps: int = Field(default=20, ge=1)
    guidance_scale: float = Field(default=3.0, ge=0)
    frames: int = Field(default=16, ge=1, description="Of a clip, where a request has none.")
    frames_per_second: float = Field(default=8.0, gt=0, le=240)
    max_frames: int = Field(default=81, ge=1)
    size_multiple: int = Field(default=16, ge=1, description="Width and height are multiples of it.")
    max_pixels: int = Field(default=2**21, ge=1, description="Width times height.")
    max_steps: int = Field(default=100, ge=1)
    max_number: int = Field(default=4, ge=1, description="Pictures or clips of one request.")
    max_prompt_characters: int = Field(default=2000, ge=1)
    max_batch: int = Field(
        default=1,
        ge=1,
        description="Pictures of equal shape computed together. Above 1, rounding may change a picture's bytes.",
    )
    max_waiting: int = Field(default=64, ge=1, description="Pictures that wait.")
    stall_seconds: float | None = Field(default=None, gt=0)
    canary_seconds: float | None = Field(default=10.0, gt=0, description="How long it is idle before it is tested.")
    canary_patience_seconds: float = Field(default=60.0, gt=0)

    @field_validator("model")
    @classmethod
    def _is_a_pipeline(cls, folder: Path) -> Path:
        if not (folder.expanduser() / "model_index.json").is_file():
            raise ValueError(f"{folder} has no model_index.json")
        return folder.expanduser()

    @model_validator(mode="after")
    def _is_consistent(self) -> "DiffusionConfig":
        if self.frames > self.max_frames:
            raise ValueError(f"frames is {self.frames}, more than max_frames, {self.max_frames}")
        if self.tea_cache and self.cpu_offload == "stream":
            raise ValueError("tea_cache: not with cpu_offload: stream, which needs the same layers in each step")
        if self.data_parallel_size > 1 and ":" in self.device:
            raise ValueError(f"data_parallel_size: {self.device} is one GPU; device: cuda has them all")
        if self.tensor_parallel_size > 1:
            self._check_ranks()
        return self

    def _check_ranks(self) -> None:
        if ":" in self.device:
            raise ValueError(f"tensor_parallel_size: {self.device} is one GPU; device: cuda has them all")
        if self.data_parallel_size > 1:
            raise ValueError("tensor_parallel_size: not with data_parallel_size; start several workers")
        if self.cpu_offload != "none":
            raise ValueError("tensor_parallel_size: not with cpu_offload, which moves whole networks")

    @property
    def served_name(self) -> str:
        """The name that clients ask for."""
        return self.name or self.model.resolve().name
