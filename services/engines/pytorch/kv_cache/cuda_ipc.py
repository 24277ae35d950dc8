"""CUDA memory handles and descriptors, and the kernel that gathers another process's blocks into this process's pool.

It calls the driver directly: PyTorch opens shared memory with the exporter's device current, which a kernel on another
device must not access.
"""

import ctypes
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from services.engines.kv import packed_ids
from services.engines.memory.cuda_driver import check, driver
from services.engines.memory.device_file import DeviceMapping
from services.engines.memory.device_memory import DeviceCopy, DeviceExport, DeviceReader, DeviceUnavailable

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
# Between GPUs this number of programs saturates the link, and leaves most of the GPU for other work.
_PROGRAMS_OF_A_LINK = 64
_PROGRAMS_OF_A_PROCESSOR = 16
_CHUNK_WORDS = 4096
_WARPS = 8
_THREADS_OF_A_PROGRAM = ctypes.c_uint(32 * _WARPS)
_ONE = ctypes.c_uint(1)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


def uuid_of(device: torch.device) -> str:
    """Returns the GPU's UUID."""
    return str(torch.cuda.get_device_properties(device).uuid)


def export_pool(pool: torch.Tensor, descriptor: int | None = None) -> DeviceExport:
    """Returns the handle of a tensor, or `descriptor`, that of the memory that the tensor begins.

    Raises DeviceUnavailable, for instance if its memory is mapped in pieces.
    """
    handle, offset = _handle_of(pool) if descriptor is None else (descriptor, 0)
    size = pool.numel() * pool.itemsize
    return DeviceExport(uuid_of(pool.device), os.getpid(), pool.data_ptr(), handle, offset, size)


def _handle_of(pool: torch.Tensor) -> tuple[bytes, int]:
    cuda, address = driver(), pool.data_ptr()
    torch.cuda.set_device(pool.device)
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    found = cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    check(found, "the pool's allocation cannot be found")
    check(cuda.cuIpcGetMemHandle(ctypes.byref(handle), base), "the pool's memory cannot be shared")
    return bytes(ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES)), address - base.value


def attach_pool(pool: torch.Tensor, export: DeviceExport) -> DeviceReader:
    """Opens another pool, to gather its blocks into `pool` `[blocks, ...]`. Raises DeviceUnavailable."""
    try:
        from services.engines.pytorch.kernels import triton_kernels
    except ImportError as error:
        raise DeviceUnavailable(f"Triton cannot be loaded: {error}") from error
    mapping = _map(export, pool.device)
    try:
        return PeerPool(triton_kernels.gather_blocks, pool, export, mapping)
    except DeviceUnavailable:
        mapping.close()
        raise


def _map(export: DeviceExport, device: torch.device) -> "DeviceMapping | _IpcMapping":
    if isinstance(export.handle, int):
        return DeviceMapping(export.handle, export.size, device)
    _check_handle(export.handle)
    return _IpcMapping(export, device)


class _IpcMapping:
    """A pool at `address`, until `close`. Memory of this process is not mapped again."""

    def __init__(self, export: DeviceExport, device: torch.device) -> None:
        self._device, self._base, self.address = device, None, export.address
        if export.process != os.getpid():
            self._base = map_export(export, device)
            self.address = self._base + export.offset

    def close(self) -> None:
        base, self._base = self._base, None
        if base is not None:
            unmap(base, self._device)


def map_export(export: DeviceExport, device: torch.device) -> int:
    """Maps another process's allocation for kernels of `device`, and returns its address. Raises DeviceUnavailable."""
    content = _check_handle(export.handle)
    torch.cuda.set_device(device)
    base, handle = ctypes.c_uint64(), _Handle()
    ctypes.memmove(ctypes.byref(handle), content, _HANDLE_BYTES)
    opened = driver().cuIpcOpenMemHandle_v2(ctypes.byref(base), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
    check(opened, f"the memory of process {export.process} on GPU {export.device} cannot be mapped")
    return base.value


def unmap(base: int, device: torch.device) -> None:
    """Ends what `map_export` began. No kernel may use the memory any more."""
    torch.cuda.set_device(device)
    driver().cuIpcCloseMemHandle(ctypes.c_uint64(base))


def _check_handle(handle: bytes | int) -> bytes:
    if isinstance(handle, int) or len(handle) != _HANDLE_BYTES:
        raise DeviceUnavailable(f"{handle!r:.80} is not a CUDA handle")
    return handle


class PeerPool:
    """A DeviceReader: kernels on a stream of its own, and the ids in memory that is taken once."""

    def __init__(
        self, kernel: Any, pool: torch.Tensor, export: DeviceExport, mapping: "DeviceMapping | _IpcMapping"
    ) -> None:
        self._device = pool.device
        self._num_blocks = len(pool)
        self._mapping = mapping
        self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._launching = threading.Lock()
        self._free: list[IdBuffer] = []
        processors = torch.cuda.get_device_properties(pool.device).multi_processor_count
        is_near = export.device == uuid_of(pool.device)
        programs = processors * _PROGRAMS_OF_A_PROCESSOR if is_near else _PROGRAMS_OF_A_LINK
        try:
            with torch.inference_mode(), torch.cuda.device(self._device):
                self._gather = Gather(kernel, pool, mapping.address, programs, self._stream)
        except (RuntimeError, AttributeError) as error:  # of the device, or of a Triton that differs
            raise DeviceUnavailable(f"the kernel that copies blocks cannot be loaded: {error}") from error
        # Of no blocks: takes the memory before a request waits for it.
        self.begin((), ()).wait()

    def begin(self, source: Sequence[int], destination: Sequence[int]) -> DeviceCopy:
        try:
            with self._launching:
                ids = self._free.pop() if self._free else IdBuffer(self._num_blocks, self._device, self._stream)
                self._gather.launch(ids, ids.fill(packed_ids(source), packed_ids(destination)))
        except RuntimeError as error:  # PyTorch raises it for almost every failure of a device
            raise DeviceUnavailable(f"the blocks could not be copied: {error}") from error
        return _Copy(ids, self._free)

    def close(self) -> None:
        self._mapping.close()


class Gather:
    """The kernel for one pair of pools, started by the driver: by way of PyTorch and Triton the start of a pull takes
    60 microseconds and more, a good part of a copy, and by the driver 14.
    """

    def __init__(self, kernel: Any, pool: torch.Tensor, address: int, programs: int, stream: torch.cuda.Stream) -> None:
        """Compiles the kernel for `pool` `[blocks, ...]`, and loads it on the current device."""
        self._words = words = pool.view(pool.shape[0], -1).view(torch.int64)
        self._programs = programs
        self._driver = driver()
        self._stream = ctypes.c_void_p(stream.cuda_stream)
        none = torch.empty(0, dtype=torch.int32, device=pool.device)
        with torch.cuda.stream(stream):
            compiled = kernel[(programs,)](
                address, words, none, words.shape[1], 0, PROGRAMS=programs, CHUNK=_CHUNK_WORDS, num_warps=_WARPS
            )
        self._function = ctypes.c_void_p(compiled.function)
        self._shared_bytes = ctypes.c_uint(compiled.metadata.shared)
        self._context = ctypes.c_void_p()
        check(self._driver.cuCtxGetCurrent(ctypes.byref(self._context)), "there is no CUDA context")
        self._fixed = ctypes.c_int64(address), ctypes.c_uint64(words.data_ptr()), ctypes.c_int32(words.shape[1])

    def launch(self, ids: "IdBuffer", count: int) -> None:
        """Starts to copy the blocks of the first `count` pairs of ids in `ids`. Any thread may call it."""
        address, words, block_words = self._fixed
        # Two more than the kernel declares: Triton gives its kernels ids of their own, of which this one needs none.
        values = address, words, ids.address, block_words, ctypes.c_int32(count), ctypes.c_void_p(), ctypes.c_void_p()
        arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        cuda, programs, one, threads = self._driver, ctypes.c_uint(self._programs), _ONE, _THREADS_OF_A_PROGRAM
        grid = programs, one, one, threads, one, one, self._shared_bytes
        check(cuda.cuCtxPushCurrent_v2(self._context), "the GPU's context is gone")
        try:
            ids.upload(cuda, count, self._stream)
            started = cuda.cuLaunchKernel(self._function, *grid, self._stream, arguments, None)
            check(started, "the blocks could not be copied")
            check(cuda.cuEventRecord(ids.event, self._stream), "the end of the copy cannot be seen")
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class IdBuffer:
    """Memory for the ids of one pull, pinned on the host and on the device, and the event behind the pull's kernel.

    The host's must not change before the event has occurred.
    """

    def __init__(self, num_blocks: int, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._host = torch.empty(2 * num_blocks, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.empty_like(self._host, device=device)
        self._bytes = self._host.numpy().data.cast("B")
        self._from = ctypes.c_void_p(self._host.data_ptr())
        self.address = ctypes.c_uint64(self._device.data_ptr())
        self.arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.arrived.record(stream)  # which creates it
        self.event = ctypes.c_void_p(self.arrived.cuda_event)

    def fill(self, source: "array[int]", destination: "array[int]") -> int:
        """Writes the ids into the host's memory, one behind the other; returns how many blocks they are."""
        middle = len(source) * source.itemsize
        self._bytes[:middle] = memoryview(source).cast("B")
        self._bytes[middle : 2 * middle] = memoryview(destination).cast("B")
        return len(source)

    def upload(self, cuda: Any, count: int, stream: ctypes.c_void_p) -> None:
        """Starts to copy so many pairs to the device."""
        if count:
            size = ctypes.c_size_t(2 * count * self._host.itemsize)
            code = cuda.cuMemcpyHtoDAsync_v2(self.address, self._from, size, stream)
            check(code, "the blocks' ids could not be copied")


class _Copy:
    """A DeviceCopy. Its ids is free again once the copy is seen to be complete; that of a failed one is dropped."""

    def __init__(self, ids: IdBuffer, free: list[IdBuffer]) -> None:
        self._ids: IdBuffer | None = ids
        self._free = free

    def is_done(self) -> bool:
        if self._ids is not None and self._asked(self._ids.arrived.query):
            self._end()
        return self._ids is None

    def wait(self) -> None:
        """Waits for the copy. The event blocks and does not spin."""
        if self._ids is not None:
            self._asked(self._ids.arrived.synchronize)
            self._end()

    def _end(self) -> None:
        if self._ids is not None:
            self._free.append(self._ids)
        self._ids = None

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except RuntimeError as error:  # PyTorch raises it for almost every failure of a device
            raise DeviceUnavailable(f"the blocks could not be copied: {error}") from error
