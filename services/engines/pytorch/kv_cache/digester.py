"""Digests of blocks, computed on the device that they are in. services/engines/seals.py defines them."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch

from services.engines.seals import digest_weights

_Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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


def _kernel_of(device: torch.device) -> _Kernel | None:
    """The kernel for a GPU with Triton, which reads the blocks once; None to use PyTorch's operations."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from services.engines.pytorch.kernels.digest_kernels import digest_blocks

    return digest_blocks
