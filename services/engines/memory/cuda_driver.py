"""CUDA's driver, called directly where PyTorch has no call for it."""

import ctypes
import threading
from functools import cache
from typing import Any

import torch

from services.engines.memory.device_memory import DeviceUnavailable

CAPTURING = threading.RLock()
"""Held by a thread that captures a graph, and by one that waits for a whole GPU, which would end another's capture."""


@cache
def driver() -> Any:
    """Returns the library. Raises DeviceUnavailable."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceUnavailable(f"CUDA's driver cannot be loaded: {error}") from error


def check(code: int, what: str) -> None:
    """Raises DeviceUnavailable if a call of the driver has failed: `what`, and the error's name."""
    if code:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(code, ctypes.byref(name))
        raise DeviceUnavailable(f"{what}: {(name.value or b'error').decode()} ({code})")


def synchronize(device: torch.device) -> None:
    """Waits until a whole GPU has done what was asked of it, when no graph is captured."""
    with CAPTURING:
        torch.cuda.synchronize(device)
