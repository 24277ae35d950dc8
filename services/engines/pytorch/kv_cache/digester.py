"""Digests of blocks, computed on the device that they are in. services/engines/seals.py defines them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch

from services.engines.seals import digest_weights

_Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Arrival(Protocol):
    """The end of a copy to host memory, as torch.cuda.Event."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests on their way to host memory, where they are once `arrived` has happened; at once if it is None."""

    home: torch.Tensor
    arrived: Arrival | None = None

    @property
    def is_there(self) -> bool:
        """True if `read` does not wait."""
        return self.arrived is None or self.arrived.query()

    def read(self) -> list[int]:
        """Waits for them, and returns them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return [int(each) for each in self.home.tolist()]


class Digester:
    """Digests blocks on a device."""

    def __init__(self, block_bytes: int, device: torch.device) -> None:
        self._kernel = _kernel_of(device)
        self._weights = torch.from_numpy(digest_weights(block_bytes)).to(device)

    def digest(self, pool: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        """Starts to digest blocks of a pool `[blocks, words]`; returns numbers on the device."""
        if self._kernel is not None:
            # From pinned memory, without waiting for what the stream does before.
            ids = torch.tensor(blocks).pin_memory().to(pool.device, non_blocking=True)
            return self._kernel(pool, ids, self._weights)
        return torch.stack([(pool[block] * self._weights).sum() for block in blocks])

    def begin(self, pool: torch.Tensor, blocks: Sequence[int]) -> Digests:
        """Starts to digest blocks of a pool, on the current stream, and to copy the digests to host memory."""
        found = self.digest(pool, blocks)
        if pool.device.type != "cuda":
            return Digests(found)
        home = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        home.copy_(found, non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        arrived.record()
        return Digests(home, arrived)


def _kernel_of(device: torch.device) -> _Kernel | None:
    """The kernel for a GPU with Triton, which reads the blocks once; None to use PyTorch's operations."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from services.engines.pytorch.kernels.digest_kernels import digest_blocks

    return digest_blocks
