"""The GPUs of this machine, and which of them a worker of a local cluster gets."""

import os
from collections.abc import Mapping, Sequence

import pynvml

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> tuple[str, ...]:
    """What CUDA would show to a process of ours, by index or UUID: all there are, unless the variable names some."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip())
    try:
        pynvml.nvmlInit()
        return tuple(map(str, range(pynvml.nvmlDeviceGetCount())))
    except pynvml.NVMLError:
        return ()


def pinned(workers: Sequence[tuple[str, int]], gpus: Sequence[str]) -> Mapping[tuple[str, int], str]:
    """A GPU for each (role, number), by turns; those with a block pool first, so that prefill and decode are apart."""
    ordered = sorted(workers, key=lambda worker: worker[0] == "encode")
    return {worker: gpus[index % len(gpus)] for index, worker in enumerate(ordered)} if gpus else {}
