"""One pool, read by its own agent into its own memory.

NIXL cannot cancel a read: it continues to write, even after its release. So reads go into a private staging area
instead of the blocks, and only closing the agent stops them for certain.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Event
from typing import Protocol

import numpy as np

from baton.engine.v1 import handoff_pb2
from services.engines.memory.device_memory import StagingDeviceMemory
from services.transports.base import PoolShape, Transfer
from services.transports.nixl_agent import Agent, Area, Bytes, NixlFailed, area_of

# The bytes of one read: still in the processor's cache when they are copied to their place.
_STAGING_BYTES = 4 * 1024 * 1024
_GPU_STAGING_BYTES = 128 * 1024 * 1024
_FIRST_PAUSE_SECONDS = 2e-5
_LONGEST_PAUSE_SECONDS = 2e-3


class Unwanted(Exception):
    """The read was cancelled."""


class Reading:
    """An agent that has connected to a pool's owner. Its methods block; one thread at a time may call them.

    Raises NixlFailed if the pool cannot be read. After that, and after Unwanted, only `close` may be called.
    `make_staging` makes the place that the bytes go to first, which is in a GPU's memory if the pool is.
    """

    def __init__(
        self,
        endpoint: handoff_pb2.NixlEndpoint,
        shape: PoolShape,
        devices: Sequence[str],
        make_staging: Callable[[PoolShape], "Staging"],
    ) -> None:
        self.staging = make_staging(shape)
        self._row_ids = np.arange(self.staging.rows, dtype=np.int32)
        self._agent = Agent(devices, serves=False)
        try:
            self._connect(endpoint, shape)
        except NixlFailed:
            self.close()
            raise

    def read(self, block_ids: Sequence[int], unwanted: Event) -> None:
        """Reads at most `rows` blocks into the first rows of `staging`. Raises Unwanted once that is set."""
        if unwanted.is_set():
            raise Unwanted
        self.staging.make_current()
        rows = self._row_ids[: len(block_ids)]
        request = self._agent.begin((self._here, rows), (self._there, np.array(block_ids, np.int32)))
        pause = _FIRST_PAUSE_SECONDS
        while not self._agent.is_over(request):
            if unwanted.wait(pause):
                raise Unwanted
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._agent.forget(request)

    def close(self) -> None:
        """Closes the agent, which stops its reads. The staging area is freed after it."""
        self._agent.close()

    def _connect(self, endpoint: handoff_pb2.NixlEndpoint, shape: PoolShape) -> None:
        here = self.staging.area
        self._agent.register(here)
        self._here = self._agent.blocks(here, shape.block_bytes)
        name = self._agent.connect(endpoint.agent_metadata)
        if name != endpoint.agent_name:
            raise NixlFailed("the agent has another name than the endpoint says")
        # A worker has one GPU, which is the first one that its process sees.
        there = Area(endpoint.address, shape.num_bytes, None if here.device is None else 0)
        self._there = self._agent.blocks(there, shape.block_bytes, owner=name)


class Staging(Protocol):
    """The memory in which bytes arrive. It is private: a read that was given up may still write into it."""

    @property
    def rows(self) -> int:
        """The number of blocks that it has room for."""

    @property
    def area(self) -> Area:
        """Its address."""

    def make_current(self) -> None:
        """Prepares the calling thread for reads into it."""

    def deliver(self, transfer: Transfer, arriving: Iterable[Sequence[int]]) -> None:
        """Copies blocks to their destination. Each step of `arriving` fills the first rows, and tells for which blocks
        of the destination; together they are the transfer's, in its order.
        """


class HostStaging:
    """A Staging in host memory, for pools there."""

    def __init__(self, shape: PoolShape) -> None:
        self.rows = max(1, min(_STAGING_BYTES // shape.block_bytes, shape.num_blocks))
        self._bytes: Bytes = np.empty(self.rows * shape.block_bytes, np.uint8)
        self.area = area_of(self._bytes)

    def make_current(self) -> None:
        """No-op."""

    def deliver(self, transfer: Transfer, arriving: Iterable[Sequence[int]]) -> None:
        """Copies what has arrived to the destination, which may be anywhere."""
        writer = transfer.memory.write(transfer.destination)
        for _, views in zip(arriving, batches(writer.views, self.area.num_bytes), strict=True):
            scatter(self._bytes, views)
        writer.commit()


class GpuStaging:
    """A Staging in the memory of the GPU whose pool the bytes are for."""

    def __init__(self, memory: StagingDeviceMemory, shape: PoolShape) -> None:
        self.rows = max(1, min(_GPU_STAGING_BYTES // shape.block_bytes, shape.num_blocks))
        self._memory = memory
        self._staging = memory.stage(self.rows)
        area = self._staging.area
        self.area = Area(area.address, area.num_bytes, area.device)

    def make_current(self) -> None:
        self._staging.make_current()

    def deliver(self, transfer: Transfer, arriving: Iterable[Sequence[int]]) -> None:
        """Delivers what has arrived. Raises NixlFailed if the destination is not the pool that this is for."""
        if transfer.memory is not self._memory:
            raise NixlFailed("a pool in a GPU's memory is read into the worker's own pool only")
        for destination in arriving:
            self._staging.store(destination)


def scatter(source: Bytes, views: Iterable[memoryview]) -> None:
    """Copies the bytes into views of the same total size."""
    start = 0
    for view in views:
        np.copyto(np.frombuffer(view, np.uint8), source[start : start + len(view)])
        start += len(view)


def batches(views: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Splits the views, in order, into lists of `size` bytes; the last one has the rest."""
    batch: list[memoryview] = []
    room = size
    for view in views:
        while len(view) >= room:
            yield [*batch, view[:room]]
            view = view[room:]
            batch, room = [], size
        if view:
            batch.append(view)
            room -= len(view)
    if batch:
        yield batch
