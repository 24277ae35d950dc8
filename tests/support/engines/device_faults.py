"""A worker on the embedded engine whose device fails, as a module to run like `services`: CONFIG key=value...

A prompt with the token ASSERTS breaks an assertion in a kernel; one of LARGE tokens or more asks for more memory than
the GPU has. Both are the GPU's own errors. On a CPU the exceptions are raised that PyTorch raises for them, and after
the assertion the interpreter's end aborts the process, as the destructors of a GPU's tensors can. After a prompt with
the token HANGS the device fails too, and closing the engine never returns nor gives up the interpreter's lock.
"""

import atexit
import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch

from services.__main__ import main
from services.engines.pytorch import parts
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.model.loading import LoadedModel
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.runners.runner import InflightStep, StepRunner
from services.engines.pytorch.runners.selection import open_runner

ASSERTS = 231
HANGS = 232
LARGE = 300


def _fail(device: torch.device, chunks: Sequence[Chunk]) -> None:
    if any(ASSERTS in chunk.sequence.prompt.token_ids for chunk in chunks):
        if device.type == "cpu":
            atexit.register(os.abort)
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        # The kernel runs later: this returns, and some later operation reports the error.
        torch.zeros(4, device=device)[torch.tensor([10], device=device)].add_(1)
    if any(HANGS in chunk.sequence.prompt.token_ids for chunk in chunks):
        EngineCore.close = _hang  # type: ignore[method-assign]
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")
    if any(chunk.count >= LARGE for chunk in chunks):
        if device.type == "cpu":
            raise torch.OutOfMemoryError("out of memory")
        total = torch.cuda.get_device_properties(device).total_memory
        torch.empty(2 * total, dtype=torch.uint8, device=device)


def _hang(_core: EngineCore) -> None:
    ctypes.PyDLL(None).sleep(3600)  # which keeps the interpreter's lock


def _open_failing_runner(config: PyTorchConfig, model: LoadedModel, *arguments: Any) -> StepRunner:
    runner = open_runner(config, model, *arguments)
    start = runner.start

    def fail_and_start(chunks: Sequence[Chunk]) -> InflightStep:
        _fail(model.device, chunks)
        return start(chunks)

    runner.start = fail_and_start  # type: ignore[method-assign]
    return runner


if __name__ == "__main__":
    parts.open_runner = _open_failing_runner  # type: ignore[attr-defined]
    main()
