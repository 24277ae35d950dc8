"""The owner's side of the nixl transport: the pool is registered once, and then read without the owner's help."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import structlog
from baton.engine.v1 import handoff_pb2

from services.kv import BlockMemory
from services.transports.nixl_agent import Agent, open_agent

log = structlog.get_logger(__name__)

LOOPBACK = ("lo",)


@asynccontextmanager
async def register_pool(
    memory: BlockMemory, devices: Sequence[str]
) -> AsyncIterator[handoff_pb2.TransportEndpoint | None]:
    """How others read this pool by NIXL while the context is open; None, and a line in the log, if it is on a device.

    Raises ConfigError where NIXL is missing or cannot use the devices.
    """
    agent = await asyncio.to_thread(open_agent, devices, True)
    try:
        yield _register(agent, memory, devices)
    finally:
        await asyncio.to_thread(agent.close)


def _register(agent: Agent, memory: BlockMemory, devices: Sequence[str]) -> handoff_pb2.TransportEndpoint | None:
    if memory.file_descriptor is None:
        log.warning("nixl does not offer this pool: it is not in host memory")
        return None
    if tuple(devices) != LOOPBACK:
        log.warning("nixl listens beyond this host, and asks nobody who he is", devices=tuple(devices))
    # One view, for the blocks are neighbours. It is of the mapping itself, which outlives the agent.
    [whole] = memory.read(range(memory.num_blocks))
    pool = np.frombuffer(whole, np.uint8)
    agent.register(pool)
    return handoff_pb2.TransportEndpoint(
        nixl=handoff_pb2.NixlEndpoint(
            agent_name=agent.name, agent_metadata=agent.metadata(), address=pool.ctypes.data, size=pool.nbytes
        )
    )
