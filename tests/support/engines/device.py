"""The device and the kernels of the embedded engine in this test run.

BATON_TEST_DEVICE is cpu if unset; `make gpu` sets cuda. BATON_TEST_EXECUTION is the engine's setting, auto if unset.
"""

import os

from runtime.machine import VARIABLE, visible_gpus

DEVICE = os.environ.get("BATON_TEST_DEVICE", "cpu")

EXECUTION = os.environ.get("BATON_TEST_EXECUTION", "auto")

ON_DEVICE: dict[str, object] = {"device": DEVICE, "dtype": "float32", "block_tokens": 16}
"""Settings of the engine that make every device compute the same ids: the plain model's dtype, the CPU's blocks."""


def share_the_machine() -> None:
    """Gives each of several test processes another first GPU, if there are several, and its part of the cores.

    To be called before CUDA and PyTorch's threads start.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if DEVICE == "cuda" and processes:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
    gpus = _gpus()
    if len(gpus) > 1:
        first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(gpus)
        os.environ[VARIABLE] = ",".join(gpus[first:] + gpus[:first])


def seeing_gpu(index: int) -> dict[str, str]:
    """The environment of a process that sees one GPU only, as a worker of `baton up` does: its turn among several.

    This process itself computes on the one with index 0.
    """
    gpus = _gpus()
    return {VARIABLE: gpus[index % len(gpus)]} if len(gpus) > 1 else {}


def _gpus() -> tuple[str, ...]:
    return visible_gpus() if DEVICE == "cuda" else ()
