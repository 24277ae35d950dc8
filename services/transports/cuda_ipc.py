"""The transport between GPUs of one host: the reader maps the owner's pool, and a kernel gathers the blocks.

The owner takes no part, but for handing over the descriptor of memory that CUDA has no handle for. Mapped memory stays
while a reader has it open, even after its owner has ended.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import structlog

from baton.engine.v1 import handoff_pb2
from runtime.aio import wait_until_done
from runtime.clock import monotonic, perf_counter
from services.engines.kv import BlockMemory
from services.engines.memory.device_memory import (
    DeviceBlockMemory,
    DeviceCopy,
    DeviceExport,
    DeviceReader,
    DeviceUnavailable,
)
from services.transports.base import (
    Endpoint,
    Exposure,
    PoolShape,
    Transfer,
    TransferFailed,
    Transport,
    TransportContext,
    TransportUnavailable,
)
from services.transports.descriptors import DescriptorOffer, fetch_descriptor
from services.transports.shm import host_id

log = structlog.get_logger(__name__)

_THREADS = 4
# A copy of 1 GiB within a GPU, or of 500 MiB between two; waking a thread from sleep takes a good part of that.
_ASKING_SECONDS = 2e-3


class CudaIpcTransport(Transport):
    """Maps pools in GPU memory; reads go into the context's `memory`, which must be in GPU memory too."""

    name = "cuda_ipc"
    supports_tls = True
    reads_early = True

    def __init__(self, context: TransportContext) -> None:
        self._memory = context.memory
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="cuda-ipc")
        self._offers: list[DescriptorOffer] = []

    async def __aexit__(self, *exception: object) -> None:
        for offer in self._offers:
            await offer.close()
        self._threads.shutdown()

    async def offer(self, memory: BlockMemory, exposure: Exposure) -> Endpoint | None:
        """Exports the pool's allocation, which processes of the same user can map. See Transport.

        Returns None if it is not in GPU memory, and, with a warning, if CUDA refuses.
        """
        del exposure
        if not isinstance(memory, DeviceBlockMemory) or not host_id():
            return None
        try:
            export = await asyncio.to_thread(memory.export)
        except DeviceUnavailable as error:
            log.warning("cuda_ipc does not offer this pool", reason=str(error))
            return None
        return Endpoint(cuda_ipc=self._endpoint(export))

    def _endpoint(self, export: DeviceExport) -> handoff_pb2.CudaIpcEndpoint:
        endpoint = handoff_pb2.CudaIpcEndpoint(
            host_id=host_id(),
            device=export.device,
            process=export.process,
            address=export.address,
            offset=export.offset,
            size=export.size,
        )
        match export.handle:
            case int() as descriptor:
                offer = DescriptorOffer(descriptor)
                self._offers.append(offer)
                endpoint.descriptor_socket, endpoint.secret = offer.name, offer.secret
            case handle:
                endpoint.handle = handle
        return endpoint

    async def open(self, endpoint: Endpoint, shape: PoolShape) -> "CudaIpcPool":
        """Maps the pool. See Transport."""
        offered = endpoint.cuda_ipc
        if not isinstance(self._memory, DeviceBlockMemory):
            raise TransportUnavailable("this worker's pool is not in a GPU's memory")
        if not offered.host_id or offered.host_id != host_id():
            raise TransportUnavailable("the pool is on a GPU of another host, container or user")
        if self._memory.block_bytes != shape.block_bytes or offered.size < shape.num_bytes:
            raise TransportUnavailable(
                f"{offered.size} bytes do not hold {shape.num_blocks} blocks of {shape.block_bytes} bytes"
            )
        opening = asyncio.get_running_loop().run_in_executor(self._threads, _attach, self._memory, offered)
        try:
            reader = await opening
        except DeviceUnavailable as error:
            raise TransportUnavailable(str(error)) from error
        return CudaIpcPool(reader, self._memory, self._threads)


def _attach(memory: DeviceBlockMemory, offered: handoff_pb2.CudaIpcEndpoint) -> DeviceReader:
    with ExitStack() as opened:
        handle: bytes | int = offered.handle
        if offered.descriptor_socket:
            handle = fetch_descriptor(offered.descriptor_socket, offered.secret)
            opened.callback(os.close, handle)
        export = DeviceExport(offered.device, offered.process, offered.address, handle, offered.offset, offered.size)
        return memory.attach(export)


class CudaIpcPool:
    """A mapped pool of an owner."""

    def __init__(self, reader: DeviceReader, memory: BlockMemory, threads: ThreadPoolExecutor) -> None:
        self._reader = reader
        self._memory = memory
        self._threads = threads

    async def pull(self, transfer: Transfer) -> None:
        """Copies with kernels. What was launched is waited for, even if the pull is cancelled. See PoolReader."""
        if transfer.memory is not self._memory:
            raise TransferFailed("the destination is not the pool that this one was opened for")
        if monotonic() > transfer.deadline:
            raise TransferFailed("deadline exceeded")
        try:
            await self._copy(transfer)
        except DeviceUnavailable as error:
            raise TransferFailed(str(error)) from error

    async def _copy(self, transfer: Transfer) -> None:
        """Begins on the event loop: a change of threads takes as long as a copy of 100 MiB."""
        copy, is_done = self._reader.begin(transfer.source, transfer.destination), False
        try:
            is_done = await _done_soon(copy)
        finally:
            if not is_done:
                await self._in_thread(copy.wait)

    async def _in_thread(self, work: Callable[[], None]) -> None:
        working = self._submit(work)
        await wait_until_done(working)
        working.result()

    def close(self) -> None:
        """Unmaps it."""
        self._submit(self._reader.close)

    def _submit(self, work: Callable[[], None]) -> "asyncio.Future[None]":
        return asyncio.get_running_loop().run_in_executor(self._threads, work)


async def _done_soon(copy: DeviceCopy) -> bool:
    """Asks between the event loop's other tasks, for a short time."""
    give_up = perf_counter() + _ASKING_SECONDS
    while not copy.is_done():
        if perf_counter() > give_up:
            return False
        await asyncio.sleep(0)
    return True
