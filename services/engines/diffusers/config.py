"""The configuration of the diffusers engine. Importable without torch and diffusers."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from services.engines.context import EngineConfig


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
    cpu_offload: Literal["none", "model", "sequential"] = Field(
        default="none", description="Keeps parts in the host's memory while they are not used: models, or layers."
    )
    width: int = Field(default=0, ge=0, description="Where a request has none; 0 is the pipeline's own.")
    height: int = Field(default=0, ge=0)
    steps: int = Field(default=20, ge=1)
    guidance_scale: float = Field(default=3.0, ge=0)
    size_multiple: int = Field(default=16, ge=1, description="Width and height are multiples of it.")
    max_pixels: int = Field(default=2**21, ge=1, description="Width times height.")
    max_steps: int = Field(default=100, ge=1)
    max_number: int = Field(default=4, ge=1, description="Pictures of one request.")
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

    @property
    def served_name(self) -> str:
        """The name that clients ask for."""
        return self.name or self.model.resolve().name
