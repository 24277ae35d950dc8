"""The reader's side of the nixl transport: RDMA between hosts, and the kernel's copies between processes of one."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from threading import Event
from types import TracebackType

from baton.engine.v1 import handoff_pb2

from rpc.aio import timeout
from rpc.settle import settle
from services.transports.nixl_agent import NixlFailed, open_agent
from services.transports.nixl_reading import Reading, Unwanted, batches, scatter
from services.transports.transport import Transfer, TransferFailed, TransportUnavailable

_OPEN_SECONDS = 5.0
_THREADS = 4
# It has some hundred bytes a region, and a pool is one.
_MAX_METADATA_BYTES = 64 * 1024


class NixlTransport:
    """Reads pools by NIXL, each through an agent of its own. Raises ConfigError without NIXL or without the devices."""

    name = "nixl"

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices
        # The first agent of a process takes half a second, in which nothing else runs: not while requests wait.
        open_agent(devices, serves=False).close()
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="nixl")

    def __enter__(self) -> "NixlTransport":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()

    async def open(self, endpoint: handoff_pb2.TransportEndpoint, num_blocks: int, block_bytes: int) -> "NixlPool":
        """Connects, and reads a block, so that a way that does not work is found out here. See Transport."""
        nixl = endpoint.nixl
        _check(nixl, num_blocks * block_bytes)
        pool = NixlPool(lambda: Reading(nixl, num_blocks, block_bytes, self._devices), self._threads)
        try:
            async with timeout(_OPEN_SECONDS):
                await pool.probe()
        except asyncio.TimeoutError as error:
            raise TransportUnavailable(f"nothing could be read within {_OPEN_SECONDS:g} s") from error
        except TransferFailed as error:
            raise TransportUnavailable(f"{error}; the log of UCX says more") from error
        return pool


def _check(endpoint: handoff_pb2.NixlEndpoint, num_bytes: int) -> None:
    if not endpoint.agent_name or not 0 < len(endpoint.agent_metadata) <= _MAX_METADATA_BYTES:
        raise TransportUnavailable("the owner describes no agent")
    if endpoint.size < num_bytes:
        raise TransportUnavailable(f"{endpoint.size} bytes are too few for {num_bytes}")
    if not 0 < endpoint.address <= 2**64 - endpoint.size:
        raise TransportUnavailable(f"{endpoint.size} bytes from {endpoint.address} are no memory")


class NixlPool:
    """One owner's pool. Pulls take turns; one that is given up while NIXL reads costs the agent, and not the pool."""

    def __init__(self, connect: Callable[[], Reading], threads: ThreadPoolExecutor) -> None:
        self._connect = connect
        self._threads = threads
        self._reading: Reading | None = None
        self._turn = asyncio.Lock()

    async def probe(self) -> None:
        """Reads a block, for nobody. Raises TransferFailed."""
        await self._in_thread(lambda reading, unwanted: reading.read([0], unwanted))

    async def pull(self, transfer: Transfer) -> None:
        """Reads and copies in a thread. See PoolReader."""
        try:
            async with timeout(transfer.deadline - time.monotonic()):
                await self._in_thread(partial(_copy, transfer))
        except asyncio.TimeoutError as error:
            raise TransferFailed("reading took too long") from error

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
                await settle(working)

    def _work(self, work: Callable[[Reading, Event], object], unwanted: Event) -> None:
        """Keeps the agent for the next one, unless it was left in the middle of something."""
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
    writer = transfer.memory.write(transfer.destination)
    rows = reading.rows
    for index, views in enumerate(batches(writer.views, rows * transfer.memory.block_bytes)):
        if unwanted.is_set():
            return
        scatter(reading.read(transfer.source[index * rows : (index + 1) * rows], unwanted), views)
    writer.commit()
