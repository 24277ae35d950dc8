"""The numbers of a step on their way to the device, and its ids on their way back, by a kernel.

A copy would wait for the device's copy engine, which moves blocks between the pool and host memory in turn: up to 3 ms.
"""

from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from numpy.typing import NDArray

_WORD_BYTES = 4
_WORDS_OF_A_PROGRAM = 1024


class HostCopies:
    """Copies between host memory and a device, in the order of the current stream. For one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernel = _kernel_of(device)
        # Pinned memory that a kernel reads or writes, which the allocator does not know, with the event after it.
        self._used: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, numbers: NDArray[Any], into: torch.Tensor) -> None:
        """Starts to copy numbers into a tensor on the device. They may change afterwards."""
        staged = torch.from_numpy(numbers)
        if self._device.type == "cpu":
            into.copy_(staged)
        else:
            self._copy(staged.pin_memory(), into)

    def bring(self, outcome: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Starts to copy rows from the device; returns them in host memory, and a function that waits for them."""
        if self._device.type == "cpu":
            return outcome.clone(), lambda: None
        home = torch.empty(outcome.shape, dtype=outcome.dtype, pin_memory=True)
        self._copy(outcome, home)
        # A blocking event, which does not spin: the next step runs meanwhile, so waking late costs nothing.
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        arrived.record()
        return home, arrived.synchronize

    def _copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        if self._kernel is None:
            into.copy_(source, non_blocking=True)
            return
        rows = len(source) if source.dim() > 1 else 1
        wide = source.element_size() // _WORD_BYTES
        words = source.numel() // max(1, rows) * wide
        strides = (each.stride(0) * wide if each.dim() > 1 else 0 for each in (source, into))
        if words:
            grid = (-(-words // _WORDS_OF_A_PROGRAM), rows)
            self._kernel[grid](source.data_ptr(), into.data_ptr(), words, *strides, CHUNK=_WORDS_OF_A_PROGRAM)
        self._keep(source if source.device.type == "cpu" else into)

    def _keep(self, pinned: torch.Tensor) -> None:
        """Holds memory until the device has read or written it."""
        after = torch.cuda.Event()  # type: ignore[no-untyped-call]
        after.record()
        self._used.append((after, pinned))
        while self._used[0][0].query() and len(self._used) > 1:
            self._used.popleft()


def _kernel_of(device: torch.device) -> Any:
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from services.engines.pytorch.kernels.triton_kernels import copy_rows

    return copy_rows
