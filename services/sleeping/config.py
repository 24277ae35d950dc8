"""The configuration of workers that share memory."""

from pathlib import Path

from pydantic import Field, model_validator

from runtime.config import Section


class SleepConfig(Section):
    """The key `sleep`: workers of a host that share memory, of which some sleep (docs/sleeping.md)."""

    group: Path | None = Field(default=None, description="The folder of those that share memory; null never sleeps.")
    group_bytes: int = Field(default=0, ge=0, description="What they may all take together; the same for each.")
    bytes: int = Field(default=0, ge=0, description="What this one takes while it is awake.")
    turn_seconds: float = Field(default=5.0, ge=0, description="How long it stays awake, at least, if it has requests.")
    wait_seconds: float = Field(default=60.0, gt=0, description="How long a request waits for its model to wake.")

    @model_validator(mode="after")
    def _fits(self) -> "SleepConfig":
        if self.group is not None and not 0 < self.bytes <= self.group_bytes:
            raise ValueError("bytes: must be more than 0, and not more than group_bytes")
        return self
