"""Offers pools for tests."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from support.transports.grants import EveryBlock

from rpc.auth.tls import TlsConfig
from services.engines.kv import BlockMemory
from services.transports.base import Endpoint, Exposure
from services.transports.registry import offer_pool, open_transports


@asynccontextmanager
async def offered(
    memory: BlockMemory, names: Sequence[str], tls: TlsConfig | None = None
) -> AsyncIterator[list[Endpoint]]:
    """Yields the endpoints of a pool on the loopback interface; all of it may be read while the context is open."""
    async with open_transports(names) as transports:
        yield await offer_pool(transports, memory, Exposure("127.0.0.1", "127.0.0.1", EveryBlock(), tls))
