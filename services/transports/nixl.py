"""The nixl transport: RDMA between hosts, and the kernel's copies between processes of one host.

An owner's pool is registered once, and then read without the owner.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from threading import Event
from typing import Annotated

import numpy as np
import structlog
from pydantic import Field
from typing_extensions import Self

from baton.engine.v1 import handoff_pb2
from runtime.aio import timeout, wait_until_done
from runtime.clock import monotonic
from services.engines.kv import BlockMemory
from services.engines.memory.device_memory import StagingDeviceMemory
from services.transports.base import (
    Endpoint,
    Exposure,
    PoolShape,
    Transfer,
    TransferFailed,
    Transport,
    TransportContext,
    TransportOptions,
    TransportUnavailable,
)
from services.transports.nixl_agent import Agent, Area, NixlFailed, area_of, open_agent
from services.transports.nixl_reading import GpuStaging, HostStaging, Reading, Staging, Unwanted

log = structlog.get_logger(__name__)

LOOPBACK = ("lo",)
_OPEN_SECONDS = 5.0
_THREADS = 4
# Metadata takes some hundred bytes a region, and a pool is one region.
_MAX_METADATA_BYTES = 64 * 1024


class NixlOptions(TransportOptions):
    """The key `transport_options.nixl`."""

    devices: tuple[Annotated[str, Field(pattern=r"^[\w.:-]+$")], ...] = Field(
        default=LOOPBACK, min_length=1, description="What UCX may use: interfaces, or RDMA ports such as mlx5_0:1."
    )


class NixlTransport(Transport):
    """Offers and reads pools through NIXL, each with its own agent.

    Entering raises ConfigError if NIXL is not installed, or a device is missing.
    """

    name = "nixl"
    supports_tls = False
    reads_early = True
    options = NixlOptions

    def __init__(self, context: TransportContext) -> None:
        options: NixlOptions = context.options
        self._devices = options.devices
        self._memory = context.memory
        self._agents = AsyncExitStack()

    async def __aenter__(self) -> Self:
        # The first agent of a process blocks for half a second: open one before requests come.
        open_agent(self._devices, serves=False).close()
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="nixl")
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._threads.shutdown()
        await self._agents.aclose()

    async def offer(self, memory: BlockMemory, exposure: Exposure) -> Endpoint | None:
        """Registers the pool, in host or in GPU memory; logs a warning and returns None if it is in neither. See
        Transport.
        """
        del exposure
        if memory.file_descriptor is None and not isinstance(memory, StagingDeviceMemory):
            log.warning("nixl does not offer this pool: it is in neither host nor GPU memory")
            return None
        if tuple(self._devices) != LOOPBACK:
            log.warning("nixl listens beyond this host, without authentication", devices=tuple(self._devices))
        agent, endpoint = await asyncio.to_thread(_serve, memory, self._devices)
        self._agents.push_async_callback(asyncio.to_thread, agent.close)
        return endpoint

    async def open(self, endpoint: Endpoint, shape: PoolShape) -> "NixlPool":
        """Connects, and reads a block, so that a path that does not work fails here. See Transport."""
        nixl = endpoint.nixl
        _check(nixl, shape.num_bytes)
        refused = []
        for staging in self._stagings():
            pool = NixlPool(partial(Reading, nixl, shape, self._devices, staging), self._threads)
            try:
                async with timeout(_OPEN_SECONDS):
                    await pool.probe()
                return pool
            except TimeoutError as error:
                raise TransportUnavailable(f"nothing could be read within {_OPEN_SECONDS:g} s") from error
            except TransferFailed as error:
                refused.append(str(error))
        raise TransportUnavailable(f"{', then '.join(refused)}; the log of UCX says more")

    def _stagings(self) -> list[Callable[[PoolShape], Staging]]:
        """Places for the bytes. An owner's agent does not say where its pool is: it refuses the other kind."""
        memory = self._memory
        return [partial(GpuStaging, memory), HostStaging] if isinstance(memory, StagingDeviceMemory) else [HostStaging]


def _serve(memory: BlockMemory, devices: Sequence[str]) -> tuple[Agent, Endpoint]:
    # First the area: it gives this thread the GPU's context, without which UCX does not find its memory.
    area = _area(memory)
    agent = open_agent(devices, serves=True)
    agent.register(area)
    endpoint = handoff_pb2.NixlEndpoint(
        agent_name=agent.name, agent_metadata=agent.metadata(), address=area.address, size=area.num_bytes
    )
    return agent, Endpoint(nixl=endpoint)


def _area(memory: BlockMemory) -> Area:
    if isinstance(memory, StagingDeviceMemory):
        found = memory.area()
        return Area(found.address, found.num_bytes, found.device)
    # One view, since all blocks are neighbours. It is of the mapping itself, which outlives the agent.
    [whole] = memory.read(range(memory.num_blocks))
    return area_of(np.frombuffer(whole, np.uint8))


def _check(endpoint: handoff_pb2.NixlEndpoint, num_bytes: int) -> None:
    if not endpoint.agent_name or not 0 < len(endpoint.agent_metadata) <= _MAX_METADATA_BYTES:
        raise TransportUnavailable("the owner describes no agent")
    if endpoint.size < num_bytes:
        raise TransportUnavailable(f"{endpoint.size} bytes are too few for {num_bytes}")
    if not 0 < endpoint.address <= 2**64 - endpoint.size:
        raise TransportUnavailable(f"{endpoint.size} bytes from {endpoint.address} are outside of memory")


class NixlPool:
    """One owner's pool. Pulls take turns. If a pull is cancelled while NIXL reads, its agent is closed;
    the pool stays.
    """

    def __init__(self, connect: Callable[[], Reading], threads: ThreadPoolExecutor) -> None:
        self._connect = connect
        self._threads = threads
        self._reading: Reading | None = None
        self._turn = asyncio.Lock()

    async def probe(self) -> None:
        """Reads a block and discards it. Raises TransferFailed."""
        await self._in_thread(lambda reading, unwanted: reading.read([0], unwanted))

    async def pull(self, transfer: Transfer) -> None:
        """Reads and copies in a thread. See PoolReader."""
        try:
            async with timeout(transfer.deadline - monotonic()):
                await self._in_thread(partial(_copy, transfer))
        except TimeoutError as error:
            raise TransferFailed("deadline exceeded") from error

    def close(self) -> None:
        """Ends the agent."""
        if self._reading is not None:
            self._threads.submit(self._reading.close)
        self._reading = None

    async def _in_thread(self, work: Callable[[Reading, Event], object]) -> None:
        async with self._turn:
            unwanted = Event()
            working = asyncio.get_running_loop().run_in_executor(self._threads, self._work, work, unwanted)
            try:
                await asyncio.shield(working)
            finally:
                unwanted.set()
                await wait_until_done(working)

    def _work(self, work: Callable[[Reading, Event], object], unwanted: Event) -> None:
        """Keeps the agent for the next pull, unless a read was interrupted."""
        reading, self._reading = self._reading, None
        try:
            reading = reading or self._connect()
            with ExitStack() as undo:
                undo.callback(reading.close)
                work(reading, unwanted)
                undo.pop_all()
        except (NixlFailed, Unwanted) as error:
            raise TransferFailed(f"NIXL: {error}") from error
        self._reading = reading


def _copy(transfer: Transfer, reading: Reading, unwanted: Event) -> None:
    reading.staging.deliver(transfer, _arriving(transfer, reading, unwanted))


def _arriving(transfer: Transfer, reading: Reading, unwanted: Event) -> Iterator[Sequence[int]]:
    """Reads as many blocks as the staging area has room for, and yields their destination; again until all are read."""
    rows = reading.staging.rows
    for start in range(0, len(transfer.source), rows):
        reading.read(transfer.source[start : start + rows], unwanted)
        yield transfer.destination[start : start + rows]
