"""The GPUs of this machine that a process of ours may use."""

import os
from itertools import takewhile

import pynvml

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> tuple[str, ...]:
    """By index or UUID: those that CUDA's variable names, or else all that NVIDIA's driver has; none without a driver.

    What the variable names need not exist.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        # As CUDA does: a name that is none hides all that come after it.
        return tuple(takewhile(bool, (name.strip() for name in chosen.split(","))))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(map(str, range(pynvml.nvmlDeviceGetCount())))
    finally:
        pynvml.nvmlShutdown()
