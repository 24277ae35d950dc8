"""A transport from outside of Baton: between workers of one process.

python -m services worker.yaml "transports=[in_process_transport:InProcessTransport, tcp]"
"""

import asyncio
import secrets

from baton.engine.v1 import handoff_pb2
from runtime.aio import run_to_completion
from services.engines.kv import BlockMemory
from services.transports import base

POOLS: dict[bytes, BlockMemory] = {}


class InProcessTransport(base.Transport):
    name = "in_process"
    supports_tls = True  # No bytes leave the process.
    reads_early = True

    def __init__(self, context: base.TransportContext) -> None:
        self._keys: list[bytes] = []

    async def __aexit__(self, *error: object) -> None:
        for key in self._keys:
            del POOLS[key]

    async def offer(self, memory: BlockMemory, exposure: base.Exposure) -> base.Endpoint | None:
        self._keys.append(key := secrets.token_bytes(16))
        POOLS[key] = memory
        return base.Endpoint(custom=handoff_pb2.CustomEndpoint(transport=self.name, description=key))

    async def open(self, endpoint: base.Endpoint, shape: base.PoolShape) -> "InProcessPool":
        if endpoint.custom.description not in POOLS:
            raise base.TransportUnavailable("the owner is another process")
        return InProcessPool(POOLS[endpoint.custom.description])


class InProcessPool(base.PoolReader):
    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory

    async def pull(self, transfer: base.Transfer) -> None:
        # The thread ends before a cancelled pull does: nothing is written after the pull has ended.
        await run_to_completion(asyncio.to_thread(self._copy, transfer))

    def _copy(self, transfer: base.Transfer) -> None:
        data = b"".join(self._memory.read(transfer.source))
        writer = transfer.memory.write(transfer.destination)
        for view in writer.views:
            view[:], data = data[: len(view)], data[len(view) :]
        writer.commit()
