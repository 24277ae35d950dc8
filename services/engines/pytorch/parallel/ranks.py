"""The operations between the ranks of a model, and those of a model that is not split."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from services.engines.pytorch.kernels.paged_ops import PagedOps


@dataclass(frozen=True, slots=True)
class ExchangeShape:
    """The sizes of decode steps: at most `rows`, of `width` numbers that are added and `columns` that are gathered."""

    rows: int
    width: int
    columns: int
    dtype: torch.dtype


ABORT_SECONDS = 5.0
"""The longest time to wait for NCCL to end its operations."""


class Ranks(Protocol):
    """All ranks call the same operations in the same order. On a GPU, a CUDA graph can capture them."""

    @property
    def size(self) -> int: ...

    def share(self, tensor: torch.Tensor) -> None:
        """Replaces the tensor by rank 0's."""

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' tensors; may overwrite `tensor`."""

    def add_and_normalise(
        self, ops: PagedOps, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds all ranks' parts to `residual` in place, and returns the normalised sum; may overwrite `part`."""

    def columns(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """Returns `[rows, width]`, of which each rank has `[rows, part]`; padding at the end is cut off.

        Only rank 0's need be right.
        """

    def prepare(self, shape: ExchangeShape) -> None:
        """Makes ready what the smaller exchanges need, before the first of them. All ranks call it."""

    def stop(self) -> None:
        """Ends operations that wait for another rank, as far as the library can. Any thread may call it."""


class OneRank:
    """Ranks of a model that is not split."""

    size = 1

    def share(self, tensor: torch.Tensor) -> None:
        """No-op."""

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor."""
        return tensor

    def add_and_normalise(
        self, ops: PagedOps, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds the part to `residual`, and returns the normalised sum."""
        return ops.rms_norm(part, residual, weight, eps)

    def columns(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """Returns the part."""
        del width
        return part

    def prepare(self, shape: ExchangeShape) -> None:
        """No-op."""

    def stop(self) -> None:
        """No-op."""


class ProcessRanks:
    """Ranks of several processes: over NCCL on GPUs, over gloo on CPUs.

    It does not use torch.distributed's default group, of which a process can have one only.
    """

    def __init__(self, group: Any, size: int) -> None:
        from torch.distributed import distributed_c10d

        library: Any = distributed_c10d  # it exports these names without saying so
        self.size = size
        self._group = group
        self._sum, self._all = library.AllreduceOptions(), library.AllgatherOptions()
        self._from_leader = library.BroadcastOptions()
        for options in (self._sum, self._all, self._from_leader):
            options.asyncOp = False  # on the current stream, so that nothing waits for another one
        self._from_leader.rootRank = self._from_leader.rootTensor = 0

    def share(self, tensor: torch.Tensor) -> None:
        _wait(lambda: self._group.broadcast([tensor], self._from_leader))

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        _wait(lambda: self._group.allreduce([tensor], self._sum))
        return tensor

    def add_and_normalise(
        self, ops: PagedOps, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return ops.rms_norm(self.add_up(part), residual, weight, eps)

    def columns(self, part: torch.Tensor, width: int) -> torch.Tensor:
        rows = len(part)
        if rows == 0:
            return part.new_empty(0, width)
        found = part.new_empty(self.size * rows, part.shape[1])
        _wait(lambda: self._group._allgather_base(found, part.contiguous(), self._all))
        whole = found.view(self.size, rows, -1).transpose(0, 1).reshape(rows, -1)
        return whole if whole.shape[1] == width else whole[:, :width].contiguous()

    def prepare(self, shape: ExchangeShape) -> None:
        """No-op."""

    def stop(self) -> None:
        """Aborts NCCL's operations; gloo's end by themselves when a connection closes."""
        if not hasattr(self._group, "abort"):
            return
        # NCCL may wait for graphs that contain its operations; nothing waits for this thread.
        aborting = threading.Thread(target=self._group.abort, name="baton-ranks-abort", daemon=True)
        aborting.start()
        aborting.join(ABORT_SECONDS)


class RankLost(RuntimeError):
    """Another rank of the model has ended or hangs, and with it the group."""


def _wait(start: Callable[[], Any]) -> None:
    try:
        work = start()
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise RankLost(f"another rank has ended or hangs: {error}") from error
