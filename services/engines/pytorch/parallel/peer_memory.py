"""Memory of each rank of a host that the others write into, and how the ranks find and map it."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from services.engines.memory.cuda_driver import synchronize
from services.engines.memory.device_memory import DeviceExport, DeviceUnavailable
from services.engines.pytorch.kv_cache.cuda_ipc import export_pool, map_export, unmap
from services.engines.pytorch.parallel.ranks import ExchangeShape
from services.engines.pytorch.parallel.shards import Shard

_ALIGNMENT = 512
_NONE = b"none"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a region: the numbers, and a flag for each piece that is written at once, of each rank."""

    data: torch.Tensor
    flags: torch.Tensor
    counters: torch.Tensor


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """This rank's region, which must live as long as another rank may write into it.

    `offsets` `[ranks]` int64 is, for each rank, the bytes from this region to that rank's, as mapped here. `stopped`
    `[1]` int32 is in host memory; 1 ends all waits.
    """

    region: torch.Tensor
    offsets: torch.Tensor
    stopped: torch.Tensor
    rows: Part
    columns: Part


def lay_out(shape: ExchangeShape, ranks: int, chunks: int, region: torch.Tensor | None = None) -> tuple[int, list[Any]]:
    """Returns the bytes of a region, and its tensors if there is one: rows, their flags, columns, their flags."""
    sizes = (
        (2 * ranks * shape.rows * shape.width, shape.dtype),
        (ranks * shape.rows, torch.int64),
        (ranks * shape.rows * shape.columns, shape.dtype),
        (ranks * shape.rows * chunks, torch.int64),
    )
    start, found = 0, []
    for count, dtype in sizes:
        size = count * dtype.itemsize
        if region is not None:
            found.append(region[start : start + size].view(dtype))
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return start, found


def peer_memory(
    region: torch.Tensor, offsets: list[int], shape: ExchangeShape, chunks: int, stopped: torch.Tensor
) -> PeerMemory:
    """Returns the memory in a region of zeros."""
    _, (rows, row_flags, columns, column_flags) = lay_out(shape, len(offsets), chunks, region)
    where = region.device

    def counters(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=where)

    return PeerMemory(
        region,
        torch.tensor(offsets, dtype=torch.int64, device=where),
        stopped,
        Part(rows, row_flags, counters(shape.rows)),
        Part(columns, column_flags, counters(shape.rows * chunks)),
    )


def open_peer_memory(
    store: Any, shard: Shard, device: torch.device, shape: ExchangeShape, chunks: int
) -> PeerMemory | None:
    """Shares a region with the other ranks of this host, which all call it. Returns None if one of them cannot.

    Raises RuntimeError if another rank does not come within the store's timeout.
    """
    region = torch.zeros(lay_out(shape, shard.size, chunks)[0], dtype=torch.uint8, device=device)
    synchronize(device)
    offsets, mapped = [0] * shard.size, []
    try:
        own = export_pool(region)
    except DeviceUnavailable:
        own = None
    store.set(f"peer-{shard.rank}", _NONE if own is None else _written(own))
    others = [_read(store.get(f"peer-{rank}")) for rank in range(shard.size)]
    is_open = own is not None
    for rank, export in enumerate(others):
        if rank != shard.rank and is_open:
            try:
                base = map_export(export, device) if export is not None else None
            except DeviceUnavailable:
                base = None
            is_open = export is not None and base is not None
            if export is not None and base is not None:
                mapped.append(base)
                offsets[rank] = base + export.offset - region.data_ptr()
    store.set(f"peer-open-{shard.rank}", b"1" if is_open else b"0")
    if not all(store.get(f"peer-open-{rank}") == b"1" for rank in range(shard.size)):
        for base in mapped:
            unmap(base, device)
        return None
    stopped = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    return peer_memory(region, offsets, shape, chunks, stopped)


def _written(export: DeviceExport) -> bytes:
    assert isinstance(export.handle, bytes)  # of memory that PyTorch has allocated
    return json.dumps({**asdict(export), "handle": export.handle.hex()}).encode()


def _read(text: bytes) -> DeviceExport | None:
    if text == _NONE:
        return None
    found = json.loads(text)
    return DeviceExport(**{**found, "handle": bytes.fromhex(found["handle"])})
