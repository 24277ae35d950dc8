"""CUDA memory handles, and the kernel that gathers another process's blocks into this process's pool.

It calls the driver directly: PyTorch opens shared memory with the exporter's device current, which a kernel on another
device must not access.
"""

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from services.engines.memory.device_memory import DeviceCopy, DeviceExport, DeviceReader, DeviceUnavailable

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
# Between GPUs this number of programs saturates the link, and leaves most of the GPU for other work.
_PROGRAMS_OF_A_LINK = 64
_PROGRAMS_OF_A_PROCESSOR = 16
_CHUNK_WORDS = 4096
_FIRST_IDS = 1024
_MOST_IDS = 4096


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceUnavailable(f"CUDA's driver cannot be loaded: {error}") from error


def _check(code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise DeviceUnavailable(f"{what}: {(name.value or b'error').decode()} ({code})")


def uuid_of(device: torch.device) -> str:
    """Returns the GPU's UUID."""
    return str(torch.cuda.get_device_properties(device).uuid)


def export_pool(pool: torch.Tensor) -> DeviceExport:
    """Returns the handle of a tensor. Raises DeviceUnavailable, for instance if its memory is mapped in pieces."""
    driver, address = _driver(), pool.data_ptr()
    torch.cuda.set_device(pool.device)
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    found = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    _check(found, "the pool's allocation cannot be found")
    _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), base), "the pool's memory cannot be shared")
    return DeviceExport(
        device=uuid_of(pool.device),
        process=os.getpid(),
        address=address,
        handle=bytes(ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES)),
        offset=address - base.value,
        size=pool.numel() * pool.itemsize,
    )


def attach_pool(pool: torch.Tensor, export: DeviceExport) -> DeviceReader:
    """Opens another pool, to gather its blocks into `pool` `[blocks, ...]`. Raises DeviceUnavailable."""
    try:
        from services.engines.pytorch.kernels import triton_kernels
    except ImportError as error:
        raise DeviceUnavailable(f"Triton cannot be loaded: {error}") from error
    _check_handle(export)
    if export.process == os.getpid():
        return PeerPool(triton_kernels.gather_blocks, pool, export, export.address, mapped=None)
    base = map_export(export, pool.device)
    return PeerPool(triton_kernels.gather_blocks, pool, export, base + export.offset, mapped=base)


def map_export(export: DeviceExport, device: torch.device) -> int:
    """Maps another process's allocation for kernels of `device`, and returns its address. Raises DeviceUnavailable."""
    _check_handle(export)
    torch.cuda.set_device(device)
    base, handle = ctypes.c_uint64(), _Handle()
    ctypes.memmove(ctypes.byref(handle), export.handle, _HANDLE_BYTES)
    opened = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(base), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
    _check(opened, f"the memory of process {export.process} on GPU {export.device} cannot be mapped")
    return base.value


def unmap(base: int, device: torch.device) -> None:
    """Ends what `map_export` began. No kernel may use the memory any more."""
    torch.cuda.set_device(device)
    _driver().cuIpcCloseMemHandle(ctypes.c_uint64(base))


def _check_handle(export: DeviceExport) -> None:
    if len(export.handle) != _HANDLE_BYTES:
        raise DeviceUnavailable(f"{len(export.handle)} bytes are not a CUDA handle")


class PeerPool:
    """A DeviceReader: kernels on a stream of its own, and the ids in memory that is taken once."""

    def __init__(self, kernel: Any, pool: torch.Tensor, export: DeviceExport, address: int, mapped: int | None) -> None:
        self._kernel = kernel
        self._words = pool.view(pool.shape[0], -1).view(torch.int64)
        self._block_words = self._words.shape[1]
        self._device = pool.device
        self._address = address
        self._mapped = mapped
        self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._launching = threading.Lock()
        self._free: list[IdRoom] = []
        processors = torch.cuda.get_device_properties(pool.device).multi_processor_count
        is_near = export.device == uuid_of(pool.device)
        self._programs = processors * _PROGRAMS_OF_A_PROCESSOR if is_near else _PROGRAMS_OF_A_LINK
        # Of no blocks: compiles the kernel, and takes the memory, before a request waits for it.
        self.begin((), ()).wait()

    def begin(self, source: Sequence[int], destination: Sequence[int]) -> DeviceCopy:
        """See DeviceReader."""
        try:
            with torch.inference_mode(), torch.cuda.device(self._device), self._launching:
                room = self._free.pop() if self._free else IdRoom(len(self._words), self._device)
                with torch.cuda.stream(self._stream):
                    self._launch(room, source, destination)
                room.arrived.record(self._stream)
        except RuntimeError as error:  # PyTorch raises it for almost every failure of a device
            raise DeviceUnavailable(f"the blocks could not be copied: {error}") from error
        return _Copy(room, self._free)

    def close(self) -> None:
        """See DeviceReader."""
        if self._mapped is not None:
            unmap(self._mapped, self._device)
        self._mapped = None

    def _launch(self, room: "IdRoom", source: Sequence[int], destination: Sequence[int]) -> None:
        """One kernel for each part of the ids: the first ones copy while the host converts the next."""
        for part in parts(len(source)):
            ids = room.upload(2 * part.start, source[part], destination[part])
            self._kernel[(self._programs,)](
                self._address,
                self._words,
                ids,
                self._block_words,
                part.stop - part.start,
                PROGRAMS=self._programs,
                CHUNK=_CHUNK_WORDS,
                num_warps=8,
            )


def parts(count: int) -> list[slice]:
    """Divides so many ids: 1,024 at first, so that the device starts soon, and up to 4,096 later. At least one part."""
    found: list[slice] = []
    start = 0
    while start < count or not found:
        stop = min(count, start + max(_FIRST_IDS, min(_MOST_IDS, start)))
        found.append(slice(start, stop))
        start = stop
    return found


class IdRoom:
    """Memory for the ids of one pull, pinned on the host and on the device, and the event behind the pull's kernels.

    The host's must not change before the event has occurred.
    """

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.empty(2 * num_blocks, dtype=torch.int32, pin_memory=on_gpu)
        self._device = torch.empty_like(self._host, device=device)
        self._bytes = self._host.numpy().data.cast("B")
        self.arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def upload(self, first: int, source: Sequence[int], destination: Sequence[int]) -> torch.Tensor:
        """Returns both on the device, one behind the other, as soon as the stream has copied them; `first` is the place
        of the first.
        """
        count = len(source)
        # Of all ways from a list to C integers the fastest one, twice as fast as NumPy's.
        struct.pack_into(f"{2 * count}i", self._bytes, 4 * first, *source, *destination)
        part = slice(first, first + 2 * count)
        return self._device[part].copy_(self._host[part], non_blocking=True)


class _Copy:
    """A DeviceCopy. Its room is free again once the copy is seen to be complete; that of a failed one is dropped."""

    def __init__(self, room: IdRoom, free: list[IdRoom]) -> None:
        self._room: IdRoom | None = room
        self._free = free

    def is_done(self) -> bool:
        """See DeviceCopy."""
        if self._room is not None and self._asked(self._room.arrived.query):
            self._end()
        return self._room is None

    def wait(self) -> None:
        """See DeviceCopy. The event is one that blocks and does not spin."""
        if self._room is not None:
            self._asked(self._room.arrived.synchronize)
            self._end()

    def _end(self) -> None:
        if self._room is not None:
            self._free.append(self._room)
        self._room = None

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except RuntimeError as error:  # PyTorch raises it for almost every failure of a device
            raise DeviceUnavailable(f"the blocks could not be copied: {error}") from error
