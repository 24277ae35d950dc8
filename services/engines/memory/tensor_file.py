"""Tensors in a file without a name, or beside one in memory of a GPU: written once, and mapped by other processes."""

import fcntl
import json
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from services.engines.memory.cuda_driver import synchronize
from services.engines.memory.device_file import device_file, map_device_file

# As PyTorch's own allocator aligns tensors on a GPU.
_ALIGNMENT = 512
_LENGTH = struct.Struct("<Q")
# So much is written at once: Linux writes less than 2 GiB in a call.
_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor within the file. Those that are one tensor under several names have one place."""

    dtype: str
    shape: list[int]
    offset: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The content of such a file: tensors that are views of it, and `facts`, which are JSON.

    Who writes to a tensor in host memory changes a copy of its own: the file is sealed. Memory of a GPU cannot be.
    """

    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]


def write_tensors(tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> list[int]:
    """Copies tensors of one device into new memory there. Returns the descriptors of all that it takes.

    They are of a file that is sealed, so that it can never change; those of a GPU are in its memory, which is the
    second. Raises OSError or DeviceUnavailable if there is no room.
    """
    places, size = _places(tensors)
    device = next(iter(tensors.values())).device
    head = json.dumps({"facts": facts, "places": {name: asdict(place) for name, place in places.items()}, "size": size})
    # A tensor with several names is written once.
    once = {place.offset: tensors[name] for name, place in places.items()}
    if device.type == "cpu":
        return [_sealed_file(head.encode(), once, size)]
    memory = _device_memory(once, size, device)
    try:
        return [_sealed_file(head.encode(), {}, 0), memory]
    except OSError:
        os.close(memory)
        raise


def read_tensors(descriptors: Sequence[int], device: torch.device) -> TensorFile:
    """Maps such memory, without copying it. The mapping lasts as long as a tensor of it; closes the descriptors.

    Raises DeviceUnavailable.
    """
    file, *memory = descriptors
    try:
        # Private: processes share its pages.
        mapping = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)
    (length,) = _LENGTH.unpack_from(mapping)
    head = json.loads(mapping[_LENGTH.size : _LENGTH.size + length])
    if memory:
        content = map_device_file(memory[0], head["size"], device)
    else:
        content = torch.frombuffer(mapping, dtype=torch.uint8, offset=_aligned(_LENGTH.size + length))
    known: dict[int, torch.Tensor] = {}
    tensors = {}
    for name, fields in head["places"].items():
        place = _Place(**fields)
        if place.offset not in known:
            known[place.offset] = _view(content, place)
        tensors[name] = known[place.offset]
    return TensorFile(tensors, head["facts"])


def _sealed_file(head: bytes, tensors: Mapping[int, torch.Tensor], size: int) -> int:
    first = _aligned(_LENGTH.size + len(head))
    descriptor = os.memfd_create("baton-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, first + size)
        os.pwrite(descriptor, _LENGTH.pack(len(head)) + head, 0)
        for offset, tensor in tensors.items():
            _write(descriptor, tensor, first + offset)
    except OSError:
        os.close(descriptor)
        raise
    # Named here: not every Python has them, and this module is imported where nothing is kept.
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _device_memory(tensors: Mapping[int, torch.Tensor], size: int, device: torch.device) -> int:
    descriptor = device_file(size, device)
    memory = map_device_file(os.dup(descriptor), size, device)
    for offset, tensor in tensors.items():
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        memory[offset : offset + len(data)].copy_(data)
    synchronize(device)
    return descriptor


def _places(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, _Place], int]:
    places: dict[str, _Place] = {}
    known: dict[tuple[object, ...], _Place] = {}
    size = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        same = (tensor.data_ptr(), dtype, tuple(tensor.shape), tensor.stride())
        if same not in known or not tensor.numel():
            known[same] = _Place(dtype, list(tensor.shape), size)
            # Never nothing: each place has an offset of its own.
            size += _aligned(max(1, tensor.numel() * tensor.itemsize))
        places[name] = known[same]
    return places, size


def _write(descriptor: int, tensor: torch.Tensor, offset: int) -> None:
    data: memoryview = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + _PIECE_BYTES], offset + done)


def _view(content: torch.Tensor, place: _Place) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, place.dtype)
    num_bytes = math.prod(place.shape) * dtype.itemsize
    return content[place.offset : place.offset + num_bytes].view(dtype).view(place.shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
