"""The key `engine.tiers`. Importable without torch."""

from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field

from runtime.config import Section


class DiskOptions(Section):
    """A tier in a file, which is worth its writes only for large models, slow GPUs or fast disks."""

    path: Path
    """Where the file is made. It loses its name at once: its space is free when the worker ends, even by a crash."""
    bytes: ByteSize = Field(gt=0)
    """The most that the file grows to."""
    write_queue_bytes: ByteSize = Field(default=ByteSize(256 << 20), gt=0)
    """Host memory for blocks on their way to the disk; when it is full, blocks are dropped instead."""


class TierOptions(Section):
    """The tiers of blocks that the device pool evicts."""

    host_bytes: ByteSize | Literal["auto"] = "auto"
    """Host memory, pinned for a GPU. auto: twice the pool, and at most half of the memory that is available."""
    load_patience_seconds: float = Field(default=5.0, gt=0)
    """A load that takes longer ends, and the rest is computed, as it does when it takes longer than computing."""
    disk: DiskOptions | None = None
    """null: blocks that leave host memory are dropped."""
