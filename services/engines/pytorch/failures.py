"""The errors that stand for PyTorch's exceptions: a device that failed, memory that is short, or another failure.

Threads that hang are detected here, too.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from baton.errors import DeviceFailed, EngineFailed, OutOfMemory

# Triton, cuBLAS, cuDNN and NCCL report a GPU's errors by RuntimeError and a text.
_OF_A_DEVICE = (
    "CUDA error",
    "Triton Error [CUDA]",
    "CUBLAS_STATUS_",
    "cuDNN error",
    "NCCL error",
    "device-side assert",
)
# Of one layer, not of a step: steps of large models take long on a CPU.
_STALL_SECONDS = 12.0


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if memory could not be allocated: nothing was computed, and the device can go on."""
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error)


def failure_of(name: str, error: RuntimeError) -> EngineFailed:
    """Returns the error that ends the thread of an engine called `name`."""
    text = f"the {name} failed: {error}"
    if is_out_of_memory(error):
        return OutOfMemory(text)
    if isinstance(error, torch.AcceleratorError) or any(mark in str(error) for mark in _OF_A_DEVICE):
        return DeviceFailed(text)
    return EngineFailed(text)


def too_large() -> OutOfMemory:
    """Returns the error of one request that needs more memory than there is."""
    torch.cuda.empty_cache()
    return OutOfMemory("there was too little memory to compute this request")


class StallDetector:
    """The working thread calls it, other threads read it. `seconds` is the longest time without a beat during work.

    Each layer of `module` beats, so that a long step counts as progress.
    """

    def __init__(self, module: torch.nn.Module, seconds: float | None) -> None:
        self._seconds = _STALL_SECONDS if seconds is None else seconds
        self._began: float | None = None
        self._beat_at = time.monotonic()
        for part in module.modules():
            if isinstance(part, torch.nn.ModuleList):
                for layer in part:
                    layer.register_forward_pre_hook(self._beat)

    @property
    def quiet_seconds(self) -> float:
        """The time since the last beat, or since the end of the last work."""
        return time.monotonic() - self._beat_at

    @property
    def is_stuck(self) -> bool:
        """True if the current work makes no progress. A thread without work does not hang."""
        began = self._began
        return began is not None and time.monotonic() - max(began, self._beat_at) > self._seconds

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Marks a piece of work."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._beat_at = time.monotonic()
            self._began = None

    def _beat(self, *_: object) -> None:
        self._beat_at = time.monotonic()
