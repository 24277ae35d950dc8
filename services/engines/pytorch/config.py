"""What can be set on the embedded PyTorch engine; importable without torch."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator
from typing_extensions import Self


class PyTorchConfig(BaseModel):
    """Options of the embedded engine. What is None is derived from the device and the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["pytorch"] = "pytorch"
    model: Path
    """A folder in Hugging Face's checkpoint layout. Nothing is ever downloaded."""
    name: str = ""
    """The name under which the model is served; the folder's name if empty."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and KV. auto: float32 on a CPU, on CUDA bfloat16 unless the checkpoint is float32."""
    kv_cache_bytes: ByteSize | None = Field(default=None, gt=0)
    """Size of the block pool; 256 MiB on a CPU, `kv_cache_fraction` of what is free on CUDA."""
    kv_cache_fraction: float = Field(default=0.8, gt=0, lt=1)
    block_tokens: int | None = Field(default=None, ge=1, le=256)
    """Tokens in a block: 16 on a CPU, 32 on CUDA."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Prompt and answer together; never more than the model's own limit or the pool."""
    max_sequences: int = Field(default=64, ge=1)
    """Requests that run at the same time."""
    max_step_tokens: int | None = Field(default=None, ge=2)
    """Tokens computed in one step, which bounds its duration: 512 on a CPU, 4096 on CUDA."""
    max_waiting: int = Field(default=256, ge=1)
    """Requests, or images to encode, that wait for room; one more is refused as Overloaded."""
    max_step_images: int = Field(default=16, ge=1)
    """Images that an encode worker looks at together."""
    max_logprobs: int = Field(default=20, ge=0)
    prefix_cache: bool = True
    stall_seconds: float | None = Field(default=None, gt=0)
    """A step that takes longer is stuck, and the worker ends: 600 s on a CPU, 60 s on CUDA."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for one operation; PyTorch's own choice if unset."""

    @model_validator(mode="after")
    def _step_holds_every_sequence(self) -> Self:
        if self.max_step_tokens is not None and self.max_step_tokens <= self.max_sequences:
            raise ValueError("max_step_tokens must be greater than max_sequences")
        return self

    @property
    def served_name(self) -> str:
        """`name`, or the folder's."""
        return self.name or self.model.resolve().name
