"""The key `engine.lora`. Importable without torch."""

from pathlib import Path

from pydantic import Field, model_validator
from typing_extensions import Self

from runtime.config import Section


class LoraOptions(Section):
    """Adapters in PEFT's layout, each in a folder of its own below `folder`."""

    folder: Path
    load: tuple[str, ...] = ()
    """Names of adapters to load at start; others are loaded when a request names them, if `on_demand`."""
    on_demand: bool = True
    max_loaded: int = Field(default=8, ge=1, le=256)
    """Adapters in memory at the same time. Their memory is taken at start."""
    max_rank: int = Field(default=16, ge=1, le=1024)
    """The largest rank of an adapter; larger ones are refused."""

    @model_validator(mode="after")
    def _all_fit(self) -> Self:
        if len(self.load) > self.max_loaded:
            raise ValueError(f"load names {len(self.load)} adapters, and max_loaded is {self.max_loaded}")
        return self
