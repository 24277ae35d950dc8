"""For tests of the transport nixl: whether NIXL is installed, and a pool that another process offers."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
from support.freezing import freeze
from support.transports.grants import HANDOFF_ID
from support.transports.pools import offered

from baton.engine.v1 import handoff_pb2
from services.engines.memory.shared_pool import SharedPool
from services.transports.base import Transfer

BLOCKS = 64
BLOCK_BYTES = 256 * 1024

INSTALLED = any(find_spec(name) for name in ("nixl_cu13", "nixl_cu12", "nixl"))

# In CI a missing NIXL is a failure.
needs_nixl = pytest.mark.skipif(
    not INSTALLED and "CI" not in os.environ, reason="NIXL is not installed: pip install 'baton-serving[nixl]'"
)

# A value of a parameter named `transport`.
NIXL = pytest.param("nixl", marks=needs_nixl)


def is_empty(pool: SharedPool) -> bool:
    return bytes(pool.block(0).obj) == bytes(BLOCKS * BLOCK_BYTES)


def _offer(pipe: Connection) -> None:
    """The owner's process; its blocks are full of ones."""

    async def serve() -> None:
        with SharedPool(BLOCKS, BLOCK_BYTES) as pool:
            pool.block(0).obj[:] = b"\x01" * (BLOCKS * BLOCK_BYTES)
            async with offered(pool, ("nixl",)) as [endpoint]:
                pipe.send(endpoint.SerializeToString())
                await asyncio.to_thread(pipe.recv)

    asyncio.run(serve())


@dataclass(frozen=True)
class Owner:
    """An owner in another process."""

    process: BaseProcess
    endpoint: handoff_pb2.TransportEndpoint

    def pause(self) -> None:
        assert self.process.pid is not None
        freeze(self.process.pid)

    def resume(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)


@asynccontextmanager
async def owner_process() -> AsyncIterator[Owner]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_offer, args=(there,))
    process.start()
    there.close()  # so that the end of the process is noticed
    try:
        assert await asyncio.to_thread(here.poll, 60)
        text = await asyncio.to_thread(here.recv)
        yield Owner(process, handoff_pb2.TransportEndpoint.FromString(text))
    finally:
        process.kill()
        process.join()


def transfer(pool: SharedPool, seconds: float = 20) -> Transfer:
    return Transfer(range(BLOCKS), pool, range(BLOCKS), time.monotonic() + seconds, HANDOFF_ID)
