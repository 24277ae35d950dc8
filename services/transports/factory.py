"""Which transports there are, by name: to offer a pool by, and to read others' pools by."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager

from baton.engine.v1 import handoff_pb2

from services.engine import BlockMemory
from services.transports import shm
from services.transports.shm import ShmTransport
from services.transports.tcp import TcpTransport
from services.transports.tcp_server import serve_pool
from services.transports.transport import Transport

_TRANSPORTS: dict[str, type[ShmTransport] | type[TcpTransport]] = {"shm": ShmTransport, "tcp": TcpTransport}


@asynccontextmanager
async def offer_pool(
    memory: BlockMemory, names: Sequence[str], listen_host: str, advertised_host: str
) -> AsyncIterator[list[handoff_pb2.TransportEndpoint]]:
    """The endpoints at which `memory` can be read while the context is open, in the order of `names`."""
    endpoints = []
    async with AsyncExitStack() as stack:
        for name in names:
            match name:
                case "shm":
                    if (endpoint := shm.endpoint(memory)) is not None:
                        endpoints.append(endpoint)
                case "tcp":
                    server = await stack.enter_async_context(serve_pool(memory, listen_host))
                    endpoints.append(server.endpoint(advertised_host))
        yield endpoints


@contextmanager
def open_transports(names: Sequence[str]) -> Iterator[list[Transport]]:
    """What reads others' pools."""
    with ExitStack() as stack:
        transports = [_TRANSPORTS[name]() for name in names]
        for transport in transports:
            stack.enter_context(transport)
        yield [*transports]
