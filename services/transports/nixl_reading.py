"""One pool, read by an agent of its own into memory of its own.

NIXL cannot take a read back: one that was given up goes on writing, also after it was released. So it never writes into
blocks, but into a staging area that nobody else has, and what stops it for certain is the end of the agent.
"""

from collections.abc import Iterable, Iterator, Sequence
from threading import Event

import numpy as np
from baton.engine.v1 import handoff_pb2

from services.transports.nixl_agent import Agent, Bytes, NixlFailed

# What is read at once: it is still in the processor's cache when it is copied to where it belongs.
_STAGING_BYTES = 4 * 1024 * 1024
_FIRST_PAUSE_SECONDS = 2e-5
_LONGEST_PAUSE_SECONDS = 2e-3


class Unwanted(Exception):
    """Nobody waits for the read any more."""


class Reading:
    """An agent that has connected to a pool's owner. Its methods block, and are for one thread at a time.

    Raises NixlFailed if the pool cannot be read; after that, and after Unwanted, it is good for nothing but `close`.
    """

    def __init__(
        self, endpoint: handoff_pb2.NixlEndpoint, num_blocks: int, block_bytes: int, devices: Sequence[str]
    ) -> None:
        self.rows = max(1, min(_STAGING_BYTES // block_bytes, num_blocks))
        self._staging: Bytes = np.empty(self.rows * block_bytes, np.uint8)
        self._row_ids = np.arange(self.rows, dtype=np.int32)
        self._block_bytes = block_bytes
        self._agent = Agent(devices, serves=False)
        try:
            self._agent.register(self._staging)
            self._here = self._agent.blocks(self._staging.ctypes.data, self.rows, block_bytes)
            name = self._agent.connect(endpoint.agent_metadata)
            if name != endpoint.agent_name:
                raise NixlFailed("the agent has another name than the endpoint says")
            self._there = self._agent.blocks(endpoint.address, num_blocks, block_bytes, owner=name)
        except NixlFailed:
            self.close()
            raise

    def read(self, block_ids: Sequence[int], unwanted: Event) -> Bytes:
        """The bytes of `rows` blocks at most, good until the next read. Raises Unwanted once that is set."""
        rows = self._row_ids[: len(block_ids)]
        request = self._agent.begin((self._here, rows), (self._there, np.array(block_ids, np.int32)))
        pause = _FIRST_PAUSE_SECONDS
        while not self._agent.is_over(request):
            if unwanted.wait(pause):
                raise Unwanted
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._agent.forget(request)
        return self._staging[: len(block_ids) * self._block_bytes]

    def close(self) -> None:
        """Ends the agent, and what it still reads. The staging area goes after it."""
        self._agent.close()


def scatter(source: Bytes, views: Iterable[memoryview]) -> None:
    """Copies the bytes into views that have as many."""
    start = 0
    for view in views:
        np.copyto(np.frombuffer(view, np.uint8), source[start : start + len(view)])
        start += len(view)


def batches(views: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """The views in their order, cut into lists of `size` bytes; the last one has what is left."""
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
