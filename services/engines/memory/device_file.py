"""Memory of a GPU with a file descriptor: for a GPU what a file without a name (memfd) is for host memory.

It lasts as long as a process has it mapped or holds a descriptor of it, also one that does not use CUDA. CUDA's other
handles (cuIpcGetMemHandle) do not exist for such memory: other processes map it by a descriptor, too.
"""

import ctypes
import os
import weakref

import torch

from services.engines.memory.cuda_driver import CAPTURING, check, driver, synchronize

# Of cuda.h: CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE, and
# CU_MEM_ACCESS_FLAGS_PROT_READWRITE.
_PINNED, _DESCRIPTOR, _ON_DEVICE, _READ_WRITE = 1, 1, 1, 3
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_NO_FLAGS = ctypes.c_ulonglong(0)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("of_windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def device_file(num_bytes: int, device: torch.device) -> int:
    """Returns the descriptor of new zeroed memory of a GPU. Raises DeviceUnavailable, also where there is no room."""
    _make_current(device)
    properties, handle = _properties(device), ctypes.c_ulonglong()
    size = ctypes.c_size_t(_rounded(num_bytes, device))
    made = driver().cuMemCreate(ctypes.byref(handle), size, ctypes.byref(properties), _NO_FLAGS)
    check(made, f"{num_bytes / 2**30:.1f} GiB that outlive the process cannot be allocated on {device}")
    descriptor = ctypes.c_int()
    exported = driver().cuMemExportToShareableHandle(ctypes.byref(descriptor), handle, _DESCRIPTOR, _NO_FLAGS)
    driver().cuMemRelease(handle)  # what was exported lasts as long as the descriptor
    check(exported, f"memory of {device} has no file descriptor")
    with torch.inference_mode():
        map_device_file(os.dup(descriptor.value), num_bytes, device).zero_()
    synchronize(device)
    return descriptor.value


def map_device_file(descriptor: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Maps such memory: a tensor of its bytes `[num_bytes]`. The mapping lasts as long as a tensor of it.

    Closes the descriptor. Raises DeviceUnavailable, for instance for a descriptor of something else.
    """
    _make_current(device)
    try:
        mapping = DeviceMapping(descriptor, num_bytes, device)
    finally:
        os.close(descriptor)
    return torch.as_tensor(mapping, device=device)


class DeviceMapping:
    """Such memory at `address` in this process, for kernels of `device`, which may be another GPU than the memory's.

    It lasts until `close`, or until nobody refers to it; PyTorch does as long as a tensor of it is. The descriptor
    stays the caller's. Raises DeviceUnavailable, for instance for a descriptor of something else, or without peer
    access.
    """

    def __init__(self, descriptor: int, num_bytes: int, device: torch.device) -> None:
        torch.cuda.set_device(device)
        size, handle = _rounded(num_bytes, device), ctypes.c_ulonglong()
        # The descriptor's number is passed as if it were a pointer.
        number = ctypes.c_void_p(descriptor)
        imported = driver().cuMemImportFromShareableHandle(ctypes.byref(handle), number, _DESCRIPTOR)
        check(imported, f"kept memory cannot be opened on {device}")
        try:
            self.address = self._map(handle, size, device)
        finally:
            driver().cuMemRelease(handle)  # what is mapped lasts as long as the mapping
        data = (self.address, False)
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": data, "version": 2}

    def _map(self, handle: ctypes.c_ulonglong, size: int, device: torch.device) -> int:
        address = ctypes.c_ulonglong()
        zero, whole = ctypes.c_size_t(0), ctypes.c_size_t(size)
        reserved = driver().cuMemAddressReserve(ctypes.byref(address), whole, zero, ctypes.c_ulonglong(0), _NO_FLAGS)
        check(reserved, f"no addresses for {size / 2**30:.1f} GiB of {device}")
        self._place = address.value, size, device
        self._unmapping = weakref.finalize(self, _unmap_when_idle, *self._place)
        self._unmapping.atexit = False
        mapped = driver().cuMemMap(address, whole, zero, handle, _NO_FLAGS)
        check(mapped, "kept memory cannot be mapped, as if it had another size")
        access = _Access(_location(device), _READ_WRITE)
        allowed = driver().cuMemSetAccess(address, whole, ctypes.byref(access), ctypes.c_size_t(1))
        check(allowed, f"kept memory cannot be used by {device}")
        return address.value

    def close(self) -> None:
        """Unmaps it, once. No kernel uses it any more.

        Unlike the end of a tensor it does not wait for the GPU, which would be an error while graphs are captured.
        """
        if self._unmapping.detach():
            _unmap(*self._place)


def _unmap_when_idle(address: int, size: int, device: torch.device) -> None:
    torch.cuda.set_device(device)
    with CAPTURING:
        driver().cuCtxSynchronize()  # a kernel may still use it
    _unmap(address, size, device)


def _unmap(address: int, size: int, device: torch.device) -> None:
    torch.cuda.set_device(device)
    driver().cuMemUnmap(ctypes.c_ulonglong(address), ctypes.c_size_t(size))
    driver().cuMemAddressFree(ctypes.c_ulonglong(address), ctypes.c_size_t(size))


def _rounded(num_bytes: int, device: torch.device) -> int:
    """The size of memory that has room for so many bytes: whole pages of the GPU."""
    page, properties = ctypes.c_size_t(), _properties(device)
    found = driver().cuMemGetAllocationGranularity(ctypes.byref(page), ctypes.byref(properties), _MINIMUM)
    check(found, f"memory of {device} cannot have a file descriptor")
    return -(-max(1, num_bytes) // page.value) * page.value


def _properties(device: torch.device) -> _Properties:
    return _Properties(type=_PINNED, handle_types=_DESCRIPTOR, location=_location(device))


def _location(device: torch.device) -> _Location:
    return _Location(_ON_DEVICE, device.index or 0)


def _make_current(device: torch.device) -> None:
    """Makes the GPU's context, which the driver's calls need, that of the calling thread."""
    torch.cuda.set_device(device)
    synchronize(device)
