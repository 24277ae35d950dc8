"""Tensors in one file without a name, which is written once, and which other processes of the host can map."""

import fcntl
import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

_ALIGNMENT = 64
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

    Who writes to a tensor changes a copy of its own: the file is sealed.
    """

    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]


def write_tensors(tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> int:
    """Copies tensors of host memory into a new file, and seals it: it can never change. Returns its descriptor.

    Raises OSError if there is no room.
    """
    places, size = _places(tensors)
    head = json.dumps({"facts": facts, "places": {name: asdict(place) for name, place in places.items()}}).encode()
    first = _aligned(_LENGTH.size + len(head))
    descriptor = os.memfd_create("baton-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, first + size)
        os.pwrite(descriptor, _LENGTH.pack(len(head)) + head, 0)
        # A tensor with several names is written once.
        for offset, name in {place.offset: name for name, place in places.items()}.items():
            _write(descriptor, tensors[name], first + offset)
    except OSError:
        os.close(descriptor)
        raise
    # Named here: not every Python has them, and this module is imported where nothing is kept.
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def read_tensors(descriptor: int) -> TensorFile:
    """Maps such a file, without copying it. The mapping lasts as long as a tensor of it; closes the descriptor."""
    try:
        # Private: processes share its pages.
        mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    (length,) = _LENGTH.unpack_from(mapping)
    head = json.loads(mapping[_LENGTH.size : _LENGTH.size + length])
    first = _aligned(_LENGTH.size + length)
    known: dict[int, torch.Tensor] = {}
    tensors = {}
    for name, fields in head["places"].items():
        place = _Place(**fields)
        if place.offset not in known:
            known[place.offset] = _view(mapping, place, first)
        tensors[name] = known[place.offset]
    return TensorFile(tensors, head["facts"])


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


def _view(mapping: mmap.mmap, place: _Place, first: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, place.dtype)
    count = math.prod(place.shape)
    if not count:
        return torch.empty(place.shape, dtype=dtype)
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=first + place.offset).view(place.shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
