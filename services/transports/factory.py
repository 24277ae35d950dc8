"""Which transports there are, by name: to offer a pool by, and to read others' pools by."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager

from baton.engine.v1 import handoff_pb2

from rpc.tls import TlsConfig
from services.kv import BlockMemory
from services.transports import shm
from services.transports.secure import OwnerTls, ReaderTls
from services.transports.shm import ShmTransport
from services.transports.tcp import TcpTransport
from services.transports.tcp_server import serve_pool
from services.transports.transport import Transport


@asynccontextmanager
async def offer_pool(
    memory: BlockMemory,
    names: Sequence[str],
    listen_host: str,
    advertised_host: str,
    tls: TlsConfig | None = None,
) -> AsyncIterator[list[handoff_pb2.TransportEndpoint]]:
    """The endpoints at which `memory` can be read while the context is open, in the order of `names`.

    With `tls` they are encrypted where they leave the host, and where it is mutual only workers are served.
    """
    owner_tls = None if tls is None else OwnerTls(tls)
    endpoints = []
    async with AsyncExitStack() as stack:
        for name in names:
            match name:
                case "shm":
                    if (endpoint := shm.endpoint(memory)) is not None:
                        endpoints.append(endpoint)
                case "tcp":
                    server = await stack.enter_async_context(serve_pool(memory, listen_host, owner_tls))
                    endpoints.append(server.endpoint(advertised_host))
        yield endpoints


@contextmanager
def open_transports(names: Sequence[str], tls: TlsConfig | None = None) -> Iterator[list[Transport]]:
    """What reads others' pools; with `tls` what they offer beyond their host must have it too."""
    reader_tls = None if tls is None else ReaderTls(tls)
    with ExitStack() as stack:
        transports: list[Transport] = []
        for name in names:
            match name:
                case "shm":
                    transports.append(stack.enter_context(ShmTransport()))
                case "tcp":
                    transports.append(stack.enter_context(TcpTransport(reader_tls)))
        yield transports
