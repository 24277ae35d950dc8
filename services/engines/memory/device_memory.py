"""Pools in GPU memory, for transports that copy between GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from services.engines.kv import BlockMemory


class DeviceUnavailable(Exception):
    """A device's memory cannot be shared or mapped; the message says why."""


@dataclass(frozen=True, slots=True)
class DeviceExport:
    """A pool as other processes of the host can map it.

    `handle` is CUDA's IPC handle of the allocation, in which the pool begins at `offset`; or a file descriptor of it,
    in this process, that whoever made the export owns. `address` is the pool's address in the owner's process
    `process`. `device` is the GPU's UUID.
    """

    device: str
    process: int
    address: int
    handle: bytes | int
    offset: int
    size: int


class DeviceCopy(Protocol):
    """A copy that runs on the device. Its caller polls `is_done`, or calls `wait`, until it is complete."""

    def is_done(self) -> bool:
        """True if the copy is complete; never blocks. Raises DeviceUnavailable if it failed."""

    def wait(self) -> None:
        """Blocks without using the processor until the copy is complete. Raises DeviceUnavailable."""


class DeviceReader(Protocol):
    """Another pool in GPU memory, opened for copies into this process's pool."""

    def begin(self, source: Sequence[int], destination: Sequence[int]) -> DeviceCopy:
        """Starts to copy blocks `source` of the other pool to blocks `destination`, and does not wait for the copy.

        Safe on several threads. The caller has checked the ids. Raises DeviceUnavailable.
        """

    def close(self) -> None:
        """Closes the other pool. No copy is running any more."""


@runtime_checkable
class DeviceBlockMemory(BlockMemory, Protocol):
    """A pool in a GPU's memory."""

    def export(self) -> DeviceExport:
        """Returns what other processes need to map it, valid until the pool is closed. Raises DeviceUnavailable."""

    def attach(self, export: DeviceExport) -> DeviceReader:
        """Opens another pool with blocks of the same size. Blocking. Raises DeviceUnavailable."""


@dataclass(frozen=True, slots=True)
class DeviceArea:
    """Memory of a GPU in this process: its address, its size, and the GPU's index in the process."""

    address: int
    num_bytes: int
    device: int


class DeviceStaging(Protocol):
    """Room for some blocks beside the pool, on its GPU, for bytes that may yet be thrown away."""

    @property
    def area(self) -> DeviceArea:
        """Its address; the blocks follow one another. Valid as long as this object lives."""

    def make_current(self) -> None:
        """Makes the GPU's context that of the calling thread."""

    def store(self, destination: Sequence[int]) -> None:
        """Copies the first blocks here to blocks `destination` of the pool, on the GPU; returns when they are there."""


@runtime_checkable
class StagingDeviceMemory(BlockMemory, Protocol):
    """A pool in a GPU's memory that a network library can register, for reads from GPU to GPU."""

    def area(self) -> DeviceArea:
        """Returns where the pool is, and makes its GPU's context that of the calling thread."""

    def stage(self, num_blocks: int) -> DeviceStaging:
        """Returns room for so many blocks, and makes the GPU's context that of the calling thread."""
