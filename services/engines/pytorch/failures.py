"""The errors that stand for PyTorch's exceptions: a device that failed, memory that is short, or another failure."""

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
