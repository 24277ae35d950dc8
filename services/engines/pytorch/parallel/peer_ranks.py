"""The operations between ranks of one host's GPUs: small ones by writing into each other's memory, others by NCCL."""

from typing import Any

import structlog
import torch

from services.engines.pytorch.kernels.paged_ops import PagedOps
from services.engines.pytorch.parallel.peer_memory import PeerMemory, open_peer_memory
from services.engines.pytorch.parallel.ranks import ExchangeShape, ProcessRanks
from services.engines.pytorch.parallel.shards import Shard

_log = structlog.get_logger(__name__)

_MOST_RANKS = 8
_MOST_ROWS = 128
"""With more rows NCCL is as fast: it is the link then that takes the time."""
_CHUNK = 4096
"""The columns that a program gathers."""


class PeerRanks:
    """Ranks whose GPUs can map each other's memory. Steps of many rows, and all without such memory, go by NCCL.

    All ranks get equal bits: each adds the same numbers in the same order.
    """

    def __init__(self, collectives: ProcessRanks, store: Any, shard: Shard, device: torch.device) -> None:
        self.size = shard.size
        self._collectives = collectives
        self._store = store
        self._shard = shard
        self._device = device
        self._exchange: Exchange | None = None

    def prepare(self, shape: ExchangeShape) -> None:
        """Maps the other ranks' memory. Raises RuntimeError if one of them does not come."""
        if self.size > _MOST_RANKS:
            return
        shape = ExchangeShape(min(shape.rows, _MOST_ROWS), shape.width, shape.columns, shape.dtype)
        memory = open_peer_memory(self._store, self._shard, self._device, shape, chunks_of(shape))
        if memory is None:
            _log.warning("the ranks' GPUs cannot map each other's memory: sums go over NCCL", rank=self._shard.rank)
            return
        self._exchange = Exchange(memory, shape, self._shard.rank, self.size)
        self._exchange.warm_up()

    def share(self, tensor: torch.Tensor) -> None:
        if exchange := self._for(tensor):
            exchange.share(tensor)
        else:
            self._collectives.share(tensor)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        if exchange := self._for(tensor):
            return exchange.add_up(tensor)
        return self._collectives.add_up(tensor)

    def add_and_normalise(
        self, ops: PagedOps, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if exchange := self._for(part):
            return exchange.add_and_normalise(part, residual, weight, eps)
        return self._collectives.add_and_normalise(ops, part, residual, weight, eps)

    def columns(self, part: torch.Tensor, width: int) -> torch.Tensor:
        if (exchange := self._exchange) is not None and exchange.gathers(part):
            return exchange.columns(part, width)
        return self._collectives.columns(part, width)

    def stop(self) -> None:
        """Ends the waits of kernels, whose results are then wrong, and NCCL's operations."""
        if self._exchange is not None:
            self._exchange.stop()
        self._collectives.stop()

    def _for(self, rows: torch.Tensor) -> "Exchange | None":
        return self._exchange if self._exchange is not None and self._exchange.adds(rows) else None


def chunks_of(shape: ExchangeShape) -> int:
    """Returns into how many parts a gathered row is divided."""
    return -(-shape.columns // _CHUNK)


class Exchange:
    """One kernel for each exchange. Nothing waits on the host, and everything can be captured in a graph."""

    def __init__(self, memory: PeerMemory, shape: ExchangeShape, rank: int, ranks: int) -> None:
        import triton

        from services.engines.pytorch.kernels import exchange_kernels

        self._kernels = exchange_kernels
        self._memory = memory
        self._shape = shape
        self._rank = rank
        self._ranks = ranks
        self._block = triton.next_power_of_2(shape.width)

    def warm_up(self) -> None:
        """Compiles the kernels of sums, before a request waits for them. All ranks call it."""
        rows = torch.zeros(1, self._shape.width, dtype=self._shape.dtype, device=self._memory.region.device)
        self.share(rows)
        self.add_up(rows)
        self.add_and_normalise(rows, rows.clone(), rows[0], 1.0)

    def adds(self, rows: torch.Tensor) -> bool:
        """True if there is room to add or share these rows."""
        return self._fits(rows, self._shape.width)

    def gathers(self, rows: torch.Tensor) -> bool:
        """True if there is room to gather these rows."""
        return self._fits(rows, self._shape.columns)

    def share(self, tensor: torch.Tensor) -> None:
        self._rows(tensor, tensor, shares=True)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        self._rows(tensor, tensor, shares=False)
        return tensor

    def add_and_normalise(
        self, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = torch.empty_like(part)
        self._rows(part, out, shares=False, norm=(residual, weight, eps))
        return out

    def columns(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """Returns all ranks' columns on rank 0, and zeros on the others."""
        rows, memory = len(part), self._memory.columns
        out = part.new_empty(rows, width) if self._rank == 0 else part.new_zeros(rows, width)
        chunks = chunks_of(self._shape)
        self._kernels.gather_columns[(rows, chunks)](
            part,
            memory.data,
            memory.flags,
            self._memory.offsets,
            memory.counters,
            self._memory.stopped,
            out,
            width,
            RANK=self._rank,
            RANKS=self._ranks,
            ROWS=self._shape.rows,
            WIDTH=self._shape.columns,
            ITEM=part.itemsize,
            CHUNKS=chunks,
            BLOCK=_CHUNK,
            num_warps=8,
        )
        return out

    def stop(self) -> None:
        """Ends the waits of kernels."""
        self._memory.stopped.numpy()[0] = 1

    def _fits(self, rows: torch.Tensor, width: int) -> bool:
        fits = rows.ndim == 2 and 0 < rows.shape[0] <= self._shape.rows and rows.shape[1] == width
        return fits and rows.dtype == self._shape.dtype and rows.is_contiguous()

    def _rows(
        self,
        part: torch.Tensor,
        out: torch.Tensor,
        *,
        shares: bool,
        norm: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    ) -> None:
        memory = self._memory.rows
        residual, weight, eps = norm or (part, part, 0.0)
        self._kernels.exchange_rows[(len(part),)](
            part,
            memory.data,
            memory.flags,
            self._memory.offsets,
            memory.counters,
            self._memory.stopped,
            residual,
            weight,
            out,
            eps,
            RANK=self._rank,
            RANKS=self._ranks,
            ROWS=self._shape.rows,
            WIDTH=self._shape.width,
            ITEM=part.itemsize,
            SHARES=shares,
            NORMALISES=norm is not None,
            BLOCK=self._block,
            num_warps=8 if self._block >= 2048 else 4,
        )
